import math

import pytest

from crossbn.lab.experiments.rows import Spread, summarize
from tests.lab.experiments.handmade import record, three_norms


def test_mean_and_standard_deviation_over_seeds() -> None:
    (row,) = summarize([record(0.2, 0.5, seconds=2.0), record(0.4, 0.7, seed=1, seconds=4.0)])
    assert (row.name, row.seeds, row.test_images, row.epochs) == ("CBN at batch 2", 2, 200, (1.0, 2.0))
    assert row.seconds == 3.0
    assert row.accuracy == row.curve[-1] == pytest.approx((0.6, 0.02**0.5))
    assert row.curve[0] == pytest.approx((0.3, 0.02**0.5))


def test_a_single_seed_has_no_standard_deviation() -> None:
    (row,) = summarize([record(0.2, 0.5)])
    assert row.accuracy == (0.5, None)


def test_a_seed_that_diverged_makes_no_error() -> None:
    assert [math.isnan(value or 0.0) for value in Spread.of([math.nan, 1.0])] == [True, True]
    mean, sd = Spread.of([math.inf, 1.0])
    assert mean == math.inf
    assert sd is not None
    assert math.isnan(sd)


def test_one_row_per_name() -> None:
    rows = summarize(three_norms())
    assert [row.name for row in rows] == ["CBN at batch 2", "BN at batch 2", "BN at batch 32"]
    assert [row.accuracy for row in rows] == [
        pytest.approx(each) for each in ((0.94, 0.01), (0.41, 0.04), (0.95, 0.01))
    ]
