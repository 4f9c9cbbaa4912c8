"""A cell of the classification tables: a norm, a batch size, and what else a training can be told.

The same training stands in several tables. A cell has one name and one set of settings wherever it stands, so that its
run is done once and found again by all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from crossbn.schedules import window_for

BURN_IN = 0.25
"""The share of the training in which a cross-iteration norm is plain batch norm: 25 of the paper's 100 epochs."""
DEFAULT = "default"
CROSS_ITERATION = {"cbn": "CBN", "naive_cbn": "naive CBN"}
TITLES = {
    **{"bn": "BN", "in": "IN", "ln": "LN", "gn": "GN", "brn": "BRN", **CROSS_ITERATION},
    **{"frozen_bn": "frozen BN", "evonorm_s0": "EvoNorm-S0", "frn_tlu": "FRN with TLU"},
}


@dataclass(frozen=True)
class Cell:
    """A training, but for its size and its seed.

    Attributes:
        norm: a key of `crossbn.nn.NORMS`.
        batch_size: images per step.
        window: steps whose statistics are pooled; 1 for norms that know one step only.
        options: of `convert_`, where they are not the default.
        burn_in: share of the training with window 1.
        gradient: of `analysis.bound.ExactWindow`, for statistics that are exact instead of remembered.
        changes: settings other than those of the scale, such as the network.
        prefix: what the changes are called.
        variant: what was changed in the norm or the network, see `improvements`.
    """

    norm: str
    batch_size: int
    window: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    burn_in: float = 0.0
    gradient: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    variant: str | None = None

    @property
    def name(self) -> str:
        """What the run is called; equal trainings of a scale have equal names.

        Example:
            >>> plain("gn", 2).name, cbn(2, order=2).name, exact(2, "own").name
            ('GN, batch 2', 'CBN, batch 2, window 8, order 2', 'exact, own gradient, batch 2, window 8')
        """
        title = TITLES[self.norm] if self.gradient is None else f"exact, {self.gradient} gradient"
        parts = [f"{self.prefix}{title}", f"batch {self.batch_size}"]
        if self.window > 1:
            parts.append(f"window {self.window}")
        parts += [f"{key} {'all' if value is None else value}" for key, value in sorted(self.options.items())]
        if self.window > 1 and self.burn_in != BURN_IN:
            parts.append(f"burn-in {self.burn_in:.0%}")
        if "learning_rate" in self.changes:
            parts.append(f"rate {self.changes['learning_rate']:g}")
        return ", ".join(parts if self.variant is None else [*parts, self.variant])


def plain(norm: str, batch_size: int) -> Cell:
    """Return the cell of a norm that knows one step only."""
    return Cell(norm, batch_size)


def cbn(
    batch_size: int,
    window: int | None = None,
    *,
    order: int = 1,
    backward: str = "through",
    positions: int | str | None = DEFAULT,
    burn_in: float = BURN_IN,
    decay: float = 1.0,
    weights: str = "equal",
) -> Cell:
    """Return the cell of a cross-iteration norm; where that is batch norm bit for bit, the cell of batch norm.

    Args:
        batch_size: images per step.
        window: None for the paper's.
        order: 0 is the norm without compensation.
        backward: "through" or "detached".
        positions: None for all; DEFAULT for what the scale has.
        burn_in: share of the training.
        decay: of the step weights.
        weights: "equal" or "auto".

    Example:
        >>> cbn(32) == plain("bn", 32), cbn(4, 2, order=0).name
        (True, 'naive CBN, batch 4, window 2')
    """
    window = window_for(batch_size) if window is None else window
    if window == 1:
        return plain("bn", batch_size)
    told: dict[str, tuple[Any, Any]] = {"decay": (decay, 1), "weights": (weights, "equal")}  # and what is usual
    if order:  # without compensation there is nothing to follow
        told |= {"order": (order, 1), "backward": (backward, "through"), "positions": (positions, DEFAULT)}
    options = {name: value for name, (value, usual) in told.items() if value != usual}
    return Cell("cbn" if order else "naive_cbn", batch_size, window, options, burn_in)


def exact(batch_size: int, gradient: str, window: int | None = None) -> Cell:
    """Return the cell of batch norm with the images of the last steps run through the network again."""
    window = window_for(batch_size) if window is None else window
    return Cell("bn", batch_size, window, {}, BURN_IN, gradient)


def varied(cell: Cell, variant: str) -> Cell:
    """Return the cell of the same training with a change in the norm or the network.

    Example:
        >>> varied(plain("bn", 2), "recalibrated").name
        'BN, batch 2, recalibrated'
    """
    return replace(cell, variant=variant)
