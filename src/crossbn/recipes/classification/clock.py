"""Times of a training, and news of its progress."""

import time
from collections import deque
from statistics import median
from typing import Any

from crossbn.integrations.engine import Callback, Trainer
from crossbn.recipes.classification.module import Classifier
from crossbn.recipes.classification.recipe import Progress

_LATEST = 1000  # forwards whose times are kept
_SECONDS_BETWEEN_NEWS = 0.5


class Clock(Callback):
    """Takes the time from one forward to the next, and tells the module's listener twice a second how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.perf_counter()
        self.times: deque[float] = deque(maxlen=_LATEST)
        self._earlier = self._earlier_per_step = 0.0
        self._before = self._told = self.started

    @property
    def seconds(self) -> float:
        """Wall-clock time since the beginning of the run, without the gaps that interruptions left."""
        return self._earlier + time.perf_counter() - self.started

    @property
    def seconds_per_step(self) -> float:
        """The median time of a forward and what belongs to it."""
        return median(self.times) if self.times else self._earlier_per_step

    def go_on(self, seconds: float, seconds_per_step: float) -> None:
        """Add what another process has taken before this one."""
        self._earlier, self._earlier_per_step = seconds, seconds_per_step

    def on_train_epoch_start(self, trainer: Trainer, module: Classifier) -> None:  # noqa: ARG002  # the engine's
        """Do not count what was before."""
        self._before = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: Classifier, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time."""
        del outputs, batch
        now = time.perf_counter()
        self.times.append(now - self._before)
        self._before = now
        if now - self._told >= _SECONDS_BETWEEN_NEWS and trainer.is_global_zero:
            self._told = now
            done = module.span.start + batch_idx + 1
            module.watch(Progress(done / module.plan.forwards, f"loss {module.tally.mean_loss:.3f}"))
