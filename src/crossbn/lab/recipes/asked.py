"""What every recipe says, whatever is trained."""

from typing import Any, Protocol


class Asked(Protocol):
    """A recipe, as the parts see it that all trainings share."""

    @property
    def batch_size(self) -> int:
        """Images per forward and process."""

    @property
    def accumulate(self) -> int:
        """Forwards of a step."""

    @property
    def epochs(self) -> int:
        """Passes over the training images."""

    @property
    def points(self) -> int | None:
        """How often to test; None for once an epoch."""

    @property
    def precision(self) -> str:
        """As Lightning names it."""

    @property
    def seed(self) -> int:
        """Of everything random."""

    @property
    def switch_norm(self) -> str | None:
        """Another norm, from `switch_epoch` on; None for the same until the end."""

    @property
    def switch_epoch(self) -> float:
        """When, in epochs."""

    def settings(self) -> dict[str, Any]:
        """Return everything that says what is computed, by name."""
