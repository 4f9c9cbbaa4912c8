"""Values that change in a straight line over a stretch of training."""

from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

Step = TypeVar("Step", float, Tensor)


@dataclass(frozen=True)
class Ramp:
    """A pure function of the training step: `before` up to `start`, `after` from `stop`, a line between.

    Steps may be tensors, so that a counter on a GPU need not be read.

    Attributes:
        before: value at the beginning.
        after: value at the end.
        start: last step with `before`.
        stop: first step with `after`.

    Raises:
        ValueError: if the ramp ends before it starts.

    Example:
        >>> [Ramp(1.0, 3.0, 5, 15)(step) for step in (0, 5, 10, 99)]
        [1.0, 1.0, 2.0, 3.0]
    """

    before: float
    after: float
    start: float
    stop: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a ramp needs 0 <= start < stop, got {self.start!r} and {self.stop!r}")

    def __call__(self, step: Step) -> Step:
        """Return the value at `step`."""
        progress = (step - self.start) / (self.stop - self.start)
        progress = progress.clamp(0, 1) if isinstance(progress, Tensor) else min(max(progress, 0.0), 1.0)
        return self.before + (self.after - self.before) * progress

    def scaled(self, factor: float) -> "Ramp":
        """Return the same ramp over `factor` times as many steps."""
        return replace(self, start=self.start * factor, stop=self.stop * factor)
