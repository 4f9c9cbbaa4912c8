"""Means, standard deviations, and differences that are more than chance."""

import math

import pytest

from crossbn.lab.statistics import CHANCE, Spread, describe_differences, paired_difference


def test_a_seed_that_diverged_makes_no_error() -> None:
    assert [math.isnan(value or 0.0) for value in Spread.of([math.nan, 1.0])] == [True, True]
    assert math.isnan(Spread.of([None]).mean)
    mean, sd = Spread.of([math.inf, 1.0])
    assert mean == math.inf
    assert sd is not None
    assert math.isnan(sd)


def test_the_interval_is_student_s() -> None:
    """The quantiles are those of every table of Student's t: 12.71, 4.303 and 2.776 for 1, 2 and 4 degrees."""
    for seeds, quantile in ((2, 12.706), (3, 4.3027), (5, 2.7764)):
        ours = {seed: float(seed % 2) for seed in range(seeds)}
        found = paired_difference(ours, dict.fromkeys(ours, 0.0))
        assert found is not None
        spread = Spread.of([*ours.values()])
        assert spread.sd is not None
        assert found.margin == pytest.approx(quantile * spread.sd / seeds**0.5, rel=1e-4)
        assert (found.mean, found.seeds) == (spread.mean, seeds)


def test_two_standard_errors_are_not_enough_at_three_seeds() -> None:
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert found is not None
    assert found.mean > 2 * 1.0 / 3**0.5
    assert not found.is_beyond_chance
    certain = paired_difference({0: 1.8, 1: 2.0, 2: 2.2}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert certain is not None
    assert certain.is_beyond_chance


def test_seeds_that_differ_alike_leave_no_doubt() -> None:
    """All norms have the same seeds, so a good seed is no difference between norms."""
    ours, others = {0: 51.0, 1: 61.1, 2: 71.2}, {0: 50.0, 1: 60.0, 2: 70.0, 3: 0.0}
    assert describe_differences(ours, {"BN": others}) == "+1.1 ± 0.2 to BN"
    assert describe_differences({7: 1.0}, {"BN": others}) == ""
    assert describe_differences({0: 51.0}, {"BN": others}) == "+1.0 to BN"  # one seed has no interval


def test_a_diverged_seed_is_doubtful() -> None:
    assert describe_differences({0: math.nan, 1: 50.0}, {"BN": {0: 1.0, 1: 2.0}}) == "+nan ± nan to BN (?)"


def test_the_confidence_is_said() -> None:
    assert "95% confidence interval" in CHANCE
