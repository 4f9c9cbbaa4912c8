import gc
import random
from collections.abc import Callable
from itertools import pairwise
from math import comb

import pytest

from crossbn.lab.cost.timing import Precision, Timing, interleave, median_interval


class Machine:
    """A clock that only work moves, and that notes who worked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []

    def work(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def do() -> None:
            self.done.append(name)
            self.now += seconds()

        return do

    def clock(self) -> float:
        return self.now


def below(count: int, rank: int) -> float:
    return sum(comb(count, i) for i in range(rank)) / 2**count


@pytest.mark.parametrize("count", range(6, 60))
def test_interval_is_the_narrowest_with_95_percent(count: int) -> None:
    low, high = median_interval(range(count, 0, -1))  # the j-th smallest value is j
    assert low + high == count + 1
    assert below(count, int(low)) <= 0.025 < below(count, int(low) + 1)


def test_an_interval_needs_six_values() -> None:
    with pytest.raises(ValueError, match="at least 6 values, got 5"):
        median_interval([1.0] * 5)
    with pytest.raises(ValueError, match="at least 6 for a 95 % interval, got 5"):
        Precision(rounds=5)


def test_timing_by_hand() -> None:
    timing = Timing.of([2.0, 3.0, 8.0, 5.0, 6.0, 7.0, 4.0], [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    assert timing == Timing(5.0, 3.0, 7.0, 4.0, 2.0, 7.0, 7)
    assert timing.uncertainty == 5.0 / 8.0


def test_stops_at_once_when_there_is_no_noise() -> None:
    machine = Machine()
    work = {"a": machine.work("a", lambda: 1.0), "b": machine.work("b", lambda: 2.5)}
    seconds = interleave(
        work, {"a": "a", "b": "a"}, warm_up=2, precision=Precision(9, max_seconds=1e9), clock=machine.clock
    )
    assert seconds == {"a": [1.0] * 9, "b": [2.5] * 9}
    assert machine.done.count("a") == machine.done.count("b") == 11
    assert Timing.of(seconds["b"], seconds["a"]).ratio == 2.5


def test_goes_on_until_the_ratio_is_known() -> None:
    machine, noise = Machine(), random.Random(3)
    work = {"a": machine.work("a", lambda: 1.0), "b": machine.work("b", lambda: noise.lognormvariate(0, 0.1))}
    news: list[float | None] = []
    seconds = interleave(
        work,
        {"a": "a", "b": "a"},
        precision=Precision(6, 0.03, 1e9),
        clock=machine.clock,
        watch=lambda _, uncertainty: news.append(uncertainty),
    )
    assert len(news) == len(seconds["b"]) > 20
    assert news[:5] == [None] * 5
    assert all(each is not None and each > 0.03 for each in news[5:-1])
    assert news[-1] == Timing.of(seconds["b"], seconds["a"]).uncertainty <= 0.03


@pytest.mark.parametrize(("most", "rounds"), [(0.0, 6), (25.0, 13)])
def test_time_is_limited_but_six_rounds_are_done(most: float, rounds: int) -> None:
    machine, values = Machine(), iter(range(1, 1000))
    work = {"a": machine.work("a", lambda: 1.0), "b": machine.work("b", lambda: next(values) % 3)}  # 2 s a round
    precision = Precision(6, 1e-9, most)
    seconds = interleave(work, {"a": "a", "b": "a"}, warm_up=0, precision=precision, clock=machine.clock)
    assert len(seconds["a"]) == len(seconds["b"]) == rounds


def test_a_machine_that_slows_down_does_not_change_ratios() -> None:
    machine = Machine()

    def slowness() -> float:
        return 1.5 ** ((len(machine.done) - 1) // 2)  # two pieces of work a round

    work = {"a": machine.work("a", slowness), "b": machine.work("b", lambda: 3 * slowness())}
    seconds = interleave(work, {"a": "a", "b": "a"}, warm_up=0, precision=Precision(8), clock=machine.clock)
    assert seconds["a"][-1] > 10 * seconds["a"][0]
    timing = Timing.of(seconds["b"], seconds["a"])
    assert (timing.ratio_low, timing.ratio, timing.ratio_high) == pytest.approx((3.0, 3.0, 3.0))


def test_each_once_a_round_after_changing_forerunners() -> None:
    machine = Machine()
    names = ["a", "b", "c"]
    work = {name: machine.work(name, lambda: 1.0) for name in names}
    interleave(
        work, dict.fromkeys(names, "a"), warm_up=0, precision=Precision(40, max_seconds=1e9), clock=machine.clock
    )
    rounds = [machine.done[i : i + 3] for i in range(0, len(machine.done), 3)]
    assert all(sorted(each) == names for each in rounds)
    followed = {pair for each in rounds for pair in pairwise(each)}
    assert len(followed) == 6


def test_no_garbage_is_collected_meanwhile() -> None:
    seen = []
    assert gc.isenabled()
    interleave({"a": lambda: seen.append(gc.isenabled())}, {"a": "a"}, warm_up=1, precision=Precision(6, 1e9))
    assert seen == [True] + [False] * 6
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        interleave({"a": fail}, {"a": "a"}, warm_up=0)
    assert gc.isenabled()
