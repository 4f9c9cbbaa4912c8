"""What every network in training has: the state of its run, and what is told on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossbn.integrations.engine import Callback, LightningModule
from crossbn.integrations.lightning import say
from crossbn.integrations.processes import gather
from crossbn.lab.data.drawing import mix
from crossbn.lab.progress import Progress
from crossbn.lab.recipes.checkpoints import Checkpoints
from crossbn.lab.recipes.clock import Clock
from crossbn.lab.recipes.loading import Images
from crossbn.lab.recipes.norms import switch_norm_
from crossbn.lab.recipes.order import Plan
from crossbn.lab.recipes.recipe import DivergedError
from crossbn.lab.recipes.resuming import identity, random_state, set_random_state
from crossbn.lab.recipes.tally import Tally


class RunModule(LightningModule):
    """A network in a run that can be taken up again at any step.

    Lightning's epochs are the spans of the plan: nothing but whole ones lies between two validations, so a checkpoint
    on the way never has one half done.

    Args:
        network: with its norms.
        recipe: of the run.
        plan: of the run.
        images: of the run.
        watch: called with points and progress, in the first process only.
        keep_going: whether to train on when the loss is not finite any more.

    Attributes:
        state_name: the key of the run's state in a checkpoint.
        curve: the measurements so far, named tuples.
    """

    state_name: str

    def __init__(
        self,
        network: nn.Module,
        recipe: Any,
        plan: Plan,
        images: Images,
        watch: Callable[[Any], None],
        keep_going: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.recipe, self.plan, self.images, self.watch, self.keep_going = recipe, plan, images, watch, keep_going
        self.spans = plan.spans
        self.switched = False
        self.switch_at = round(recipe.switch_epoch * plan.steps_per_epoch) * plan.accumulate
        self.tally = Tally()
        self.curve: list[Any] = []
        self.clock = Clock()
        self._random: list[Tensor] | None = None
        self._times = {"busy": 0.0, "waited": 0.0}  # of earlier processes; this one's busy seconds come to them
        self._started = 0.0

    @staticmethod
    def load_images(recipe: Any, folder: Path | None) -> Images:
        """Return what the recipe trains and tests on; the folder is that of the data sets."""
        raise NotImplementedError

    @staticmethod
    def build(recipe: Any, images: Images) -> nn.Module:
        """Return the recipe's network, with BatchNorm wherever a norm can be chosen."""
        raise NotImplementedError

    @staticmethod
    def give_norm_(network: nn.Module, recipe: Any, plan: Plan) -> Callback | None:
        """Put the recipe's norm into its network; return the callback that it needs, if it needs one."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        # The engine notes here which hook it is in, some forty times a step, and a module looks at whatever is set.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

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
        self._started = time.perf_counter()
        if self.recipe.switch_norm is not None and self.span.start + batch_idx == self.switch_at:
            say(f"epoch {self.recipe.switch_epoch:g}: {self._switch_()}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the time that the forward and what belongs to it have taken."""
        del outputs, batch, batch_idx
        self._times["busy"] += time.perf_counter() - self._started

    def _switch_(self) -> str:
        self.switched = True
        return str(switch_norm_(self.network, self.recipe, self.plan)).partition("\n")[0]

    def times(self) -> dict[str, float]:
        """Return the seconds of training forwards and what belongs to them, and those of waiting for images."""
        return {**self._times, "waited": self._times["waited"] + self.trainer.datamodule.waited}

    @property
    def waiting_share(self) -> float:
        """Of the time of training forwards and what belongs to them, what was spent waiting for images."""
        times = self.times()
        return times["waited"] / max(sum(times.values()), 1e-9)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the run; the order of images and their augmentation need none."""
        self.check_loss(together=True)  # a checkpoint to go on from is one of a network that can be trained
        checkpoint[self.state_name] = {
            "recipe": identity(self.recipe, self.trainer.world_size),
            "switched": self.switched,
            "curve": [list(point) for point in self.curve],
            "seconds": self.clock.seconds,
            "seconds_per_step": self.clock.seconds_per_step,
            "times": self.times(),
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
        self.curve[:] = [self.recipe.point_type(*point) for point in saved["curve"]]
        self._times = dict(saved.get("times", self._times))
        self.clock.go_on(saved["seconds"], saved["seconds_per_step"])

    def on_train_start(self) -> None:
        """Begin with random numbers of this seed and process, or go on with them; they are the model's alone."""
        if self._random is None:
            torch.manual_seed(mix(self.recipe.seed, self.trainer.global_rank))
        else:
            set_random_state(self._random, self.device)

    def tell_progress(self, batch_idx: int) -> None:
        """Take the time of a forward that begins, and tell the progress now and then."""
        if self.clock.tick() and self.tally.forwards:
            self.check_loss()
            if self.trainer.is_global_zero:
                share = (self.span.start + batch_idx) / self.plan.forwards
                self.watch(Progress(share, f"loss {self.tally.mean_loss:.3f}"))

    def check_loss(self, together: bool = False) -> None:
        """Raise DivergedError if the loss since the last point of the curve is not finite, unless told to keep going.

        It waits for the device, so it is called twice a second and before what is kept.

        Args:
            together: whether all processes call it: they stop if the loss of one is not finite.
        """
        diverged = not self.keep_going and not math.isfinite(self.tally.mean_loss)
        if together and self.trainer.world_size > 1:
            diverged = self.trainer.strategy.reduce_boolean_decision(diverged, all=False)
        if diverged:
            rate = self.recipe.effective_learning_rate(self.plan.processes)
            kept = any(isinstance(each, Checkpoints) and each.path.exists() for each in self.trainer.callbacks)
            raise DivergedError(
                f"the loss is not finite after {self.trainer.global_step} steps: a learning rate below {rate:g} may "
                f"help, or a larger batch{'; the last checkpoint is from before' if kept else ''}"
            )

    def log_loss(self, loss: Tensor) -> None:
        """Write the loss into the log, as often as the engine writes."""
        # Asked more often than it writes, the engine's log would cost more than a small network's step.
        if self.trainer.loggers and (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:
            self.log("loss", loss)

    def on_validation_start(self) -> None:
        """Let all processes test the same network: the first one's, whose running statistics are saved."""
        self.check_loss(together=True)
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
