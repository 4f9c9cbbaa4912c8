import pytest

from crossbn.lab.experiments.accuracies import MEASURES, accuracies_of, grid_rows, list_rows
from crossbn.lab.experiments.cells import cbn, plain
from crossbn.lab.experiments.classification import make_tasks
from crossbn.lab.experiments.experiment import Scale
from tests.lab.experiments.classified import by_norm, result

BN, GN, CBN = plain("bn", 2), plain("gn", 2), cbn(2)


def test_rows_of_a_list_have_accuracies_time_and_the_difference_to_one_of_them() -> None:
    results = [result(task, by_norm(task)) for task in make_tasks([BN, CBN], Scale.SMALL, 2)]
    bn, ours = list_rows(results, {"BN": BN, "GN": GN, "CBN": CBN}, "CBN", {"BN": 65.1, "GN": 68.9})
    assert (bn.name, ours.name) == ("BN", "CBN")  # GN was not run
    assert bn.ours["accuracy"] == pytest.approx((51, 2**0.5))
    assert bn.ours["training"] == pytest.approx((61, 2**0.5))
    assert ours.ours["milliseconds"] == pytest.approx((10, 0))
    assert (bn.paper, ours.paper) == ({"accuracy": 65.1}, {})
    assert (bn.remark, ours.remark) == ("-10.0 to CBN", "")
    assert {measure.name for measure in MEASURES} == bn.ours.keys()


def test_rows_of_a_grid_compare_one_column_with_the_others() -> None:
    results = [result(task, by_norm(task)) for task in make_tasks([BN, CBN, plain("bn", 32)], Scale.SMALL, 2)]
    grid = {
        "two": {"BN": BN, "GN": GN, "CBN": CBN},
        "four": {"BN": plain("bn", 4), "CBN": cbn(4)},
        "many": {"BN": plain("bn", 32), "CBN": cbn(32)},
    }
    two, many = grid_rows(results, grid, "CBN")  # the second was not run
    assert (two.name, many.name) == ("two", "many")
    assert two.ours == {"BN": pytest.approx((51, 2**0.5)), "CBN": pytest.approx((61, 2**0.5))}
    assert two.remark == "+10.0 to BN"
    assert many.ours["BN"] == many.ours["CBN"]  # the same run
    assert many.remark == ""


def test_a_difference_within_the_noise_or_of_one_seed_is_doubtful() -> None:
    tasks = make_tasks([BN, CBN], Scale.SMALL, 2)
    near = [result(task, 0.5 + (0.03 * task.seed - 0.005) * (task.name == CBN.name)) for task in tasks]
    assert list_rows(near, {"BN": BN, "CBN": CBN}, "CBN")[0].remark == "-1.0 to CBN (?)"
    alone = [result(task, by_norm(task)) for task in make_tasks([BN, CBN], Scale.SMALL, 1)]
    assert list_rows(alone, {"BN": BN, "CBN": CBN}, "CBN")[0].remark == "-10.0 to CBN (?)"


def test_seeds_that_differ_alike_leave_no_doubt() -> None:
    """All norms have the same seeds, so a good seed is no difference between norms."""
    tasks = make_tasks([BN, CBN], Scale.SMALL, 3)
    alike = [result(task, 0.5 + 0.01 * (task.name == CBN.name) + (0.001 + 0.1) * task.seed) for task in tasks]
    assert list_rows(alike, {"BN": BN, "CBN": CBN}, "CBN")[0].remark == "-1.0 to CBN"
    fewer = [one for one in alike if one.task.seed < 2 or one.task.name == CBN.name]
    assert list_rows(fewer, {"BN": BN, "CBN": CBN}, "CBN")[0].remark == "-1.0 to CBN"  # of the seeds that both have


def test_accuracies_are_in_percent_and_may_be_missing() -> None:
    results = [result(task, 0.25) for task in make_tasks([BN], Scale.SMALL, 1)]
    assert accuracies_of(results, BN) == {0: 25.0}
    assert accuracies_of(results, GN) == {}
