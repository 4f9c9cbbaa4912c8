"""What is measured: a model, its input and the norms to compare; and cases that differ in one size at a time."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from crossbn.lab.cost.timing import Precision
from crossbn.lab.environment import usable_cores
from crossbn.schedules import window_for

BASELINE = "bn"
WINDOWED = ("cbn", "naive_cbn")  # they have a window, and a burn-in before it


class CaseError(ValueError):
    """A case that cannot be measured."""


def default_threads() -> int:
    """Return as many threads as OMP_NUM_THREADS says, else as many as there are cores for this process."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdecimal() and int(told) else usable_cores()


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
        ValueError: if "bn" is not among the norms, one of them comes twice, or a size is below 1.
    """

    model: str
    input_shape: tuple[int, ...]
    batch_size: int
    window: int
    norms: tuple[str, ...] = ("bn", "gn", "cbn")
    positions: int | None = 128
    compile: bool = False
    device: str = "cpu"
    threads: int = field(default_factory=default_threads)
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        if BASELINE not in self.norms or len(set(self.norms)) < len(self.norms):
            raise ValueError(f"norms must be different ones, bn among them, got {', '.join(self.norms)}")
        sizes = (*self.input_shape, self.batch_size, self.window, self.threads)
        if not self.input_shape or min(sizes) < 1:
            raise ValueError(
                f"sizes must be at least 1, got input {self.input_shape}, batch {self.batch_size}, window "
                f"{self.window}, threads {self.threads}"
            )

    def __str__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        return f"{self.model}, input {shape}, batch {self.batch_size}, window {self.window}"


Growth = Mapping[str, Sequence[Case]]
"""Cases by the size that they differ in: "window", "batch size" or "image size"."""


def sweep(
    base: Case, windows: Sequence[int] = (), batch_sizes: Sequence[int] = (), image_sizes: Sequence[int] = ()
) -> Growth:
    """Return the cases in which one size takes its values while the others are those of `base`.

    Without windows, that of a batch size is the paper's, `window_for(batch_size)`, or the one of `base` where both are
    the same for it.

    Example:
        >>> base = Case("resnet18", (3, 64, 64), batch_size=4, window=4)
        >>> {name: [str(case) for case in cases] for name, cases in sweep(base, batch_sizes=[4, 8]).items()}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'batch size': ['resnet18, input 3x64x64, batch 4, window 4', 'resnet18, input 3x64x64, batch 8, window 2']}
    """
    follows = not windows and base.window == window_for(base.batch_size)
    growth = {
        "window": [replace(base, window=window) for window in windows],
        "batch size": [
            replace(base, batch_size=size, window=window_for(size) if follows else base.window) for size in batch_sizes
        ],
        "image size": [replace(base, input_shape=(base.input_shape[0], size, size)) for size in image_sizes],
    }
    return {name: cases for name, cases in growth.items() if len(cases) > 1}


def distinct(base: Case, growth: Growth) -> list[Case]:
    """Return every case once, that of all sizes' meeting first."""
    return list(dict.fromkeys([base, *(case for cases in growth.values() for case in cases)]))
