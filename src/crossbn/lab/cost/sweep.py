"""Cases that differ in one size at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crossbn.lab.cost.cases import Case
from crossbn.schedules import window_for

Growth = Mapping[str, Sequence[Case]]
"""Cases by the size that they differ in: "window", "batch size" or "image size"."""


def sweep(
    base: Case, windows: Sequence[int] = (), batch_sizes: Sequence[int] = (), image_sizes: Sequence[int] = ()
) -> Growth:
    """Return the cases in which one size takes its values while the others are those of `base`.

    Without windows, that of a batch size is the paper's, `window_for(batch_size)`, or the one of `base` where both are
    the same for it.

    Args:
        base: the case where all sizes meet.
        windows: to measure.
        batch_sizes: to measure.
        image_sizes: to measure: height and width.

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
