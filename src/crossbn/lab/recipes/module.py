"""What every network in training has: the state of its run, and what is told on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossbn.integrations.engine import LightningModule
from crossbn.integrations.processes import gather
from crossbn.lab.recipes.asked import Asked
from crossbn.lab.recipes.classification.clock import Clock
from crossbn.lab.recipes.classification.order import Plan, mix
from crossbn.lab.recipes.classification.recipe import Progress
from crossbn.lab.recipes.classification.resuming import identity, random_state, set_random_state
from crossbn.lab.recipes.classification.tally import Tally


class RunModule(LightningModule):
    """A network in a run that can be taken up again at any step.

    Lightning's epochs are the spans of the plan: nothing but whole ones lies between two validations, so a checkpoint
    on the way never has one half done.

    Args:
        network: with its norms.
        recipe: of the run.
        plan: of the run.
        watch: called with points and progress, in the first process only.

    Attributes:
        state_name: the key of the run's state in a checkpoint.
        curve: the measurements so far, named tuples.
    """

    state_name: str

    def __init__(self, network: nn.Module, recipe: Asked, plan: Plan, watch: Callable[[Any], None]) -> None:
        super().__init__()
        self.network = network
        self.asked, self.plan, self.watch = recipe, plan, watch
        self.spans = plan.spans
        self.switched = False
        self.switch_at = round(recipe.switch_epoch * plan.steps_per_epoch) * plan.accumulate
        self.tally = Tally()
        self.curve: list[Any] = []
        self.clock = Clock()
        self._random: list[Tensor] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # The engine notes here which hook it is in, some forty times a step, and a module looks at whatever is set.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def switch_norm_(self) -> None:
        """Turn the norms of the network into the recipe's other norm."""
        raise NotImplementedError

    def point_of(self, saved: list[Any]) -> Any:
        """Return the point of the curve that a checkpoint has as a list."""
        raise NotImplementedError

    def more_state(self) -> dict[str, Any]:
        """Return what a kind of training adds to the state of its runs."""
        return {}

    @property
    def span(self) -> range:
        """The forwards between the last point of the curve and the next."""
        return self.spans[min(self.trainer.current_epoch, len(self.spans) - 1)]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Switch the norm, when it is time."""
        del batch
        if self.asked.switch_norm is not None and self.span.start + batch_idx == self.switch_at:
            self._switch_()

    def _switch_(self) -> None:
        self.switch_norm_()
        self.switched = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the run; the order of images and their augmentation need none."""
        checkpoint[self.state_name] = {
            "recipe": identity(self.asked, self.trainer.world_size),
            "switched": self.switched,
            "curve": [list(point) for point in self.curve],
            "seconds": self.clock.seconds,
            "seconds_per_step": self.clock.seconds_per_step,
            "processes": gather({"tally": self.tally.sums(), "random": random_state(self.device)}),
            **self.more_state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it over, and have the norm that the weights are of before they are loaded."""
        saved = checkpoint[self.state_name]
        if saved.get("switched") and not self.switched:
            self._switch_()
        own = saved["processes"][self.trainer.global_rank]
        self.tally = Tally.of(own["tally"], self.trainer.strategy.root_device)
        self._random = own["random"]
        self.curve[:] = [self.point_of(point) for point in saved["curve"]]
        self.clock.go_on(saved["seconds"], saved["seconds_per_step"])

    def on_train_start(self) -> None:
        """Begin with random numbers of this seed and process, or go on with them; they are the model's alone."""
        if self._random is None:
            torch.manual_seed(mix(self.asked.seed, self.trainer.global_rank))
        else:
            set_random_state(self._random, self.device)

    def tell_progress(self, batch_idx: int) -> None:
        """Take the time of a forward that begins, and tell the progress now and then."""
        if self.clock.tick() and self.tally.forwards and self.trainer.is_global_zero:
            share = (self.span.start + batch_idx) / self.plan.forwards
            self.watch(Progress(share, f"loss {self.tally.mean_loss:.3f}"))

    def log_loss(self, loss: Tensor) -> None:
        """Write the loss into the log, as often as the engine writes."""
        # Asked more often than it writes, the engine's log would cost more than a small network's step.
        if self.trainer.loggers and (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:
            self.log("loss", loss)

    def on_validation_start(self) -> None:
        """Let all processes test the same network: the first one's, whose running statistics are saved."""
        if self.trainer.world_size > 1:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, 0)

    def add_point(self, point: Any, numbers: dict[str, float]) -> None:
        """Add a point to the curve, its numbers to the log, and begin a new tally."""
        self.tally = Tally()
        self.curve.append(point)
        for logger in self.trainer.loggers:
            logger.log_metrics(numbers, self.trainer.global_step)
        if self.trainer.is_global_zero:
            self.watch(point)
