"""Rows of a table: what the seeds of a run have in common, and how far they differ."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from crossbn.lab.experiments.records import Record


class Spread(NamedTuple):
    """Several measurements of the same thing."""

    mean: float
    sd: float | None
    """Sample standard deviation (n - 1 in the denominator); None for a single measurement, nan if one diverged."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0])
            Spread(mean=2.0, sd=1.0)
        """
        if len(values) == 1:
            return cls(values[0], None)
        # Of what is not finite, `stdev` raises an error where `fmean` returns nan.
        return cls(fmean(values), stdev(values) if all(map(math.isfinite, values)) else math.nan)


def exceeds_noise(a: Spread, b: Spread, seeds: int) -> bool:
    """Tell whether two means differ by more than twice the standard error of their difference; one seed never tells.

    Args:
        a: over the seeds.
        b: over as many.
        seeds: how many.

    Example:
        >>> exceeds_noise(Spread(5.0, 1.0), Spread(3.0, 1.0), 4), exceeds_noise(Spread(5.0, 1.0), Spread(3.0, 1.0), 2)
        (True, False)
    """
    if a.sd is None or b.sd is None:
        return False
    return abs(a.mean - b.mean) > 2 * math.hypot(a.sd, b.sd) / math.sqrt(seeds)


def is_beyond_chance(differences: Sequence[float]) -> bool:
    """Tell whether differences, one for each seed, are on average more than twice their standard error from 0.

    Example:
        >>> is_beyond_chance([1.0, 1.2, 1.4]), is_beyond_chance([1.0, -0.5, 1.4]), is_beyond_chance([3.0])
        (True, False, False)
    """
    mean, sd = Spread.of(differences)
    return sd is not None and abs(mean) > 2 * sd / math.sqrt(len(differences))


@dataclass(frozen=True)
class Row:
    """The records that share a name, seed after seed, as one.

    Attributes:
        name: of the runs.
        norm: theirs.
        batch_size: theirs.
        window: theirs.
        seeds: how many there are.
        test_images: how many images each accuracy is a share of.
        accuracy: at the end of training, 0 to 1.
        seconds: mean wall-clock time of a run.
        epochs: when the points of `curve` were measured.
        curve: accuracy at each of `epochs`.
    """

    name: str
    norm: str
    batch_size: int
    window: int
    seeds: int
    test_images: int
    accuracy: Spread
    seconds: float
    epochs: tuple[float, ...]
    curve: tuple[Spread, ...]


def summarize(records: Iterable[Record]) -> list[Row]:
    """Return a row for each name among the records, in the order in which the names first come up."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.run.name, []).append(record)
    return [_row(group) for group in by_name.values()]


def _row(group: Sequence[Record]) -> Row:
    first = group[0]
    at_each_point = zip(*(record.curve for record in group), strict=True)
    return Row(
        name=first.run.name,
        norm=first.run.norm,
        batch_size=first.run.batch_size,
        window=first.run.window,
        seeds=len(group),
        test_images=first.test_images,
        accuracy=Spread.of([record.accuracy for record in group]),
        seconds=fmean(record.seconds for record in group),
        epochs=tuple(point.epoch for point in first.curve),
        curve=tuple(Spread.of([point.accuracy for point in points]) for points in at_each_point),
    )
