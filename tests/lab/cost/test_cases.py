from dataclasses import replace

import pytest

from crossbn.lab.cost.cases import distinct, sweep
from crossbn.lab.cost.suites import make_suite, ratios_of
from tests.lab.cost.handmade import case, records


def test_one_size_at_a_time() -> None:
    base = case(batch_size=4, window=2)
    growth = sweep(base, windows=[2, 4, 8], batch_sizes=[4, 8], image_sizes=[6, 12])
    assert [each.window for each in growth["window"]] == [2, 4, 8]
    assert [(each.batch_size, each.window) for each in growth["batch size"]] == [(4, 2), (8, 2)]
    assert [each.input_shape for each in growth["image size"]] == [(3, 6, 6), (3, 12, 12)]
    assert len(distinct(base, growth)) == 5
    assert distinct(base, growth)[0] == base


def test_the_paper_s_window_follows_the_batch_size_unless_one_is_given() -> None:
    base = case(batch_size=4, window=4)
    assert [each.window for each in sweep(base, batch_sizes=[4, 2, 16])["batch size"]] == [4, 8, 1]
    assert [each.window for each in sweep(base, windows=[4], batch_sizes=[4, 2, 16])["batch size"]] == [4, 4, 4]


def test_a_single_value_does_not_grow() -> None:
    assert sweep(case(), windows=[3], batch_sizes=[2], image_sizes=[6]) == {}
    assert distinct(case(), {}) == [case()]


def test_targets_are_six_cases() -> None:
    goals = make_suite("targets", threads=1)
    told = [(g.case.model, g.case.input_shape[-1], g.case.batch_size, g.case.window) for g in goals]
    assert told == [
        ("resnet18", 224, 4, 4),
        ("resnet50", 224, 4, 4),
        ("resnet18", 224, 2, 8),
        ("resnet18", 112, 4, 4),
        ("mobilenet_v2", 224, 4, 4),
        ("densenet121", 224, 4, 4),
    ]
    assert all(goal.case.norms == ("bn", "cbn") for goal in goals)
    assert goals[2].targets["history"] == 7.0
    with pytest.raises(ValueError, match="no suite 'target': did you mean targets"):
        make_suite("target")


def test_ratios_of_records() -> None:
    bn, _, cbn = records(case(), cbn=1.25)
    times = {"train": 1.25, "burn_in": 1.02, "eval": 1.0, "folded": 0.9}
    assert ratios_of(cbn, bn) == {**times, "history": 2.0, "peak": 1.1}
    assert ratios_of(replace(cbn, paired_weight_bytes=0), bn) == {**times, "peak": 1.1}


def test_detection_is_compared_with_gn_as_well() -> None:
    (goal,) = make_suite("detection", threads=1)
    assert (goal.case.input_shape, goal.case.batch_size, goal.case.window) == ((3, 256, 256), 2, 8)
    assert goal.case.norms == ("bn", "gn", "cbn")
    assert (goal.targets["train"], goal.targets["folded_to_gn"]) == (1.10, 1.0)
