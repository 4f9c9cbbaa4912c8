"""What several measurements of the same thing tell: mean, standard deviation, and what is more than chance."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95
"""Of every interval that tables, figures and pages tell."""
CHANCE = (
    "Differences are mean differences between runs of the same seed, in points, ± half of their "
    f"{CONFIDENCE:.0%} confidence interval (Student's t over the seeds). A question mark stands where 0 is within it: "
    "the difference may be chance; of twenty differences that are none, one has no question mark. A difference "
    "without ± is of one seed, which has no interval."
)


class Spread(NamedTuple):
    """Several measurements of the same thing."""

    mean: float
    sd: float | None
    """Sample standard deviation (n - 1 in the denominator); None for a single measurement, nan if one diverged."""

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread":
        """Return the spread of at least one value; None is one that was not finite.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0])
            Spread(mean=2.0, sd=1.0)
        """
        numbers = [math.nan if value is None else value for value in values]
        if len(numbers) == 1:
            return cls(numbers[0], None)
        # Of what is not finite, `stdev` raises an error where `fmean` returns nan.
        return cls(fmean(numbers), stdev(numbers) if all(map(math.isfinite, numbers)) else math.nan)


class Difference(NamedTuple):
    """A mean difference between runs of the same seed."""

    mean: float
    margin: float | None
    """Half of the confidence interval; None for a single seed, which tells nothing about chance."""
    seeds: int

    @property
    def is_beyond_chance(self) -> bool:
        """Whether 0 is outside of the confidence interval."""
        return self.margin is not None and abs(self.mean) > self.margin

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" if self.margin is None else f"{self.mean:+.1f} ± {self.margin:.1f}"


def paired_difference(ours: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """Return how far measurements are from others, seed by seed; None if no seed has both.

    Args:
        ours: by seed.
        others: by seed.

    Example:
        >>> found = paired_difference({0: 3.0, 1: 3.2, 2: 4.0}, {0: 2.0, 1: 2.0, 2: 2.6, 3: 9.0})
        >>> round(found.mean, 2), round(found.margin, 2), found.seeds, found.is_beyond_chance
        (1.2, 0.5, 3, True)
    """
    differences = [value - others[seed] for seed, value in ours.items() if seed in others]
    if not differences:
        return None
    mean, sd = Spread.of(differences)
    seeds = len(differences)
    return Difference(mean, None if sd is None else _quantile(seeds - 1) * sd / math.sqrt(seeds), seeds)


@cache
def _quantile(degrees: int) -> float:
    """Return how many standard errors the confidence interval reaches to each side."""
    from scipy.special import stdtrit  # scikit-learn brings it; `scipy.stats` has the same and takes a second to import

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def describe_differences(ours: Mapping[int, float], others: Mapping[str, Mapping[int, float]]) -> str:
    """Say how far measurements are from others, seed by seed, with a question mark where 0 is in the interval.

    Example:
        >>> ours, bn, gn = {0: 47.0, 1: 49.0}, {0: 43.0, 1: 45.2}, {0: 48.0, 1: 48.8}
        >>> describe_differences(ours, {"BN": bn, "GN": gn, "LN": {}})
        '+3.9 ± 1.3 to BN, -0.4 ± 7.6 to GN (?)'
    """
    found = {name: paired_difference(ours, other) for name, other in others.items()}
    return ", ".join(
        f"{each} to {name}{' (?)' if each.margin is not None and not each.is_beyond_chance else ''}"
        for name, each in found.items()
        if each
    )
