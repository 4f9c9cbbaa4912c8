"""Time of several things side by side, in rounds, so that what disturbs the machine disturbs all of them alike.

| name | formula |
|---|---|
| seconds | one call, wall-clock |
| ratio | median over the rounds of seconds / seconds of the baseline in the same round |
| its interval | 95 % confidence, between two order statistics of those ratios: no distribution is assumed |

In every round each thing is done once, in an order drawn anew, so that none of them has always the same forerunner to
warm its caches. Rounds go on until every ratio is known well enough. Looking at the interval after each round makes
it a little optimistic: simulated with ratios that scatter by 10 %, it covers the truth in 93 % of the cases.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Name = TypeVar("Name", bound=Hashable)

FEWEST_ROUNDS = 6  # with fewer, even the smallest and the largest value enclose the median in less than 95 %


@dataclass(frozen=True)
class Precision:
    """When there are rounds enough.

    Attributes:
        rounds: at least this many, and at least 6.
        tolerance: half the interval of each ratio, relative to the ratio, at most.
        max_seconds: no further round after this time, however wide the intervals.

    Raises:
        ValueError: if there would be fewer than 6 rounds.
    """

    rounds: int = 20
    tolerance: float = 0.03
    max_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.rounds < FEWEST_ROUNDS:
            raise ValueError(f"rounds must be at least {FEWEST_ROUNDS} for a 95 % interval, got {self.rounds}")


@dataclass(frozen=True)
class Timing:
    """How long something takes, and how that compares with its baseline.

    Attributes:
        seconds: median.
        seconds_low: first quartile.
        seconds_high: third quartile.
        ratio: median of the ratios to the baseline, round by round.
        ratio_low: lower end of its 95 % interval.
        ratio_high: upper end.
        rounds: how many.
    """

    seconds: float
    seconds_low: float
    seconds_high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float], baseline: Sequence[float]) -> "Timing":
        """Return the timing of calls beside those of the baseline, round by round.

        Example:
            >>> Timing.of([2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 6).ratio_high
            7.0
        """
        ordered, rounds = sorted(seconds), len(seconds)
        ratios = [own / other for own, other in zip(seconds, baseline, strict=True)]
        quartiles = ordered[(rounds - 1) // 4], ordered[rounds - 1 - (rounds - 1) // 4]
        return cls(median(seconds), *quartiles, median(ratios), *median_interval(ratios), rounds)

    @property
    def uncertainty(self) -> float:
        """Half the interval of the ratio, relative to the ratio."""
        return (self.ratio_high - self.ratio_low) / (2 * self.ratio)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval for the median of what the values are a sample of.

    A value lies below the median with probability 1/2, so the j-th smallest of n exceeds it with probability
    P(Binomial(n, 1/2) < j); the interval lies between the j-th smallest and the j-th largest with the largest j for
    which that is at most 2.5 %.

    Raises:
        ValueError: for fewer than 6 values.

    Example:
        >>> median_interval([5, 1, 4, 2, 3, 9, 8, 7, 6])
        (2, 8)
    """
    count = len(values)
    if count < FEWEST_ROUNDS:
        raise ValueError(f"a 95 % interval of the median needs at least {FEWEST_ROUNDS} values, got {count}")
    below, rank = 0.5**count, 0
    while below <= 0.025:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def interleave(
    work: Mapping[Name, Callable[[], object]],
    baselines: Mapping[Name, Name],
    *,
    warm_up: int = 3,
    precision: Precision | None = None,
    clock: Callable[[], float] = time.perf_counter,
    watch: Callable[[int, float | None], None] = lambda *_: None,
) -> dict[Name, list[float]]:
    """Time each piece of work once a round, until the ratios are known; return seconds by name, round by round.

    Args:
        work: what to time, by name.
        baselines: for the name of each piece of work, the name of what it is compared with.
        warm_up: calls of each before the first round.
        precision: when to stop.
        clock: returns seconds.
        watch: called after each round with the rounds so far and the largest uncertainty, None until there is one.

    Example:
        >>> seconds = interleave({"a": int, "b": str}, {"a": "a", "b": "a"}, precision=Precision(6, 1e9))
        >>> {name: len(rounds) for name, rounds in seconds.items()}
        {'a': 6, 'b': 6}
    """
    precision = precision or Precision()
    for each in work.values():
        for _ in range(warm_up):
            each()
    seconds: dict[Name, list[float]] = {name: [] for name in work}
    order = random.Random(0)
    started, rounds = clock(), 0
    uncertainty: float | None = None
    while rounds < FEWEST_ROUNDS or clock() - started < precision.max_seconds:
        with _no_garbage_collection():
            for name in order.sample(list(work), len(work)):
                before = clock()
                work[name]()
                seconds[name].append(clock() - before)
        rounds += 1
        if rounds >= FEWEST_ROUNDS:
            uncertainty = max(Timing.of(seconds[n], seconds[baselines[n]]).uncertainty for n in work)
        watch(rounds, uncertainty)
        if rounds >= precision.rounds and uncertainty is not None and uncertainty <= precision.tolerance:
            break
    return seconds


def clock_of(device: "torch.device") -> Callable[[], float]:
    """Return a clock that first waits for what the device has still to do."""
    if device.type != "cuda":
        return time.perf_counter
    import torch

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect before or after, not while something is timed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
