"""What is measured: a model, its input, and the norms to compare."""

from dataclasses import dataclass, field

import torch

from crossbn.lab.cost.timing import Precision
from crossbn.nn import NORMS, Settings

BASELINE = "bn"
WINDOWED = ("cbn", "naive_cbn")  # they have a window, and a burn-in before it


class CaseError(ValueError):
    """A case that cannot be measured."""


@dataclass(frozen=True)
class Case:
    """What one measurement is told: equal cases are the same work.

    Attributes:
        model: its name, as `find_model` takes it.
        input_shape: of one example.
        batch_size: examples per step.
        window: steps that norms with a window pool.
        norms: to compare; "bn", the baseline, is one of them.
        positions: samples of CBN's variance gradients, at most; None for all positions.
        compile: whether to measure under `torch.compile` as well.
        device: where.
        threads: of torch on the processor.
        precision: when to stop.

    Raises:
        ValueError: if "bn" is not among the norms, one of them is unknown or comes twice, or a size is below 1.
    """

    model: str
    input_shape: tuple[int, ...]
    batch_size: int
    window: int
    norms: tuple[str, ...] = ("bn", "gn", "cbn")
    positions: int | None = Settings.positions
    compile: bool = False
    device: str = "cpu"
    threads: int = field(default_factory=torch.get_num_threads)
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        unknown = [norm for norm in self.norms if norm not in NORMS]
        if unknown or BASELINE not in self.norms or len(set(self.norms)) < len(self.norms):
            raise ValueError(f"norms must be different ones of {', '.join(NORMS)}, bn among them, got {self.norms}")
        sizes = (*self.input_shape, self.batch_size, self.window, self.threads)
        if not self.input_shape or min(sizes) < 1:
            raise ValueError(
                f"sizes must be at least 1, got input {self.input_shape}, batch {self.batch_size}, window "
                f"{self.window}, threads {self.threads}"
            )

    def __str__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        return f"{self.model}, input {shape}, batch {self.batch_size}, window {self.window}"
