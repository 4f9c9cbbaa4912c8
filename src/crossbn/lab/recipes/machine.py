"""Where a recipe is carried out."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What a run computes with and how often it saves: no part of what it computes, but for the number of processes.

    Attributes:
        accelerator: as Lightning names it: "auto", "cpu", "gpu".
        devices: on each machine, a process each; None for one, or as many as torchrun has started.
        nodes: machines; None for one, or as many as torchrun has started on.
        strategy: as Lightning names it; "auto" is one process, or DDP where there are more.
        workers: processes that prepare batches for each that trains; None for what suits the data.
        data_folder: of the data sets; None for the variable CROSSBN_DATA's, else `data`.
        checkpoint_seconds: between two checkpoints within an epoch; there is one after each epoch in any case.
        checkpoint_steps: between two checkpoints within an epoch, in steps; None for no such rule.
        keep_going: whether to train on when the loss is not finite any more.
    """

    accelerator: str = "auto"
    devices: int | None = None
    nodes: int | None = None
    strategy: str = "auto"
    workers: int | None = None
    data_folder: Path | None = None
    checkpoint_seconds: float = 300.0
    checkpoint_steps: int | None = None
    keep_going: bool = False

    @property
    def processes_per_node(self) -> int:
        """How many train side by side on each machine."""
        return self.devices or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's name

    @property
    def nodes_used(self) -> int:
        """How many machines there are."""
        return self.nodes or int(os.environ.get("GROUP_WORLD_SIZE", "1"))

    @property
    def processes(self) -> int:
        """How many train side by side."""
        return self.processes_per_node * self.nodes_used
