import json

import pytest

from crossbn.lab.experiments.cost import Cost, case_of
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.progress import Progress
from crossbn.lab.records import Record, Task
from tests.lab.cost.handmade import records
from tests.lab.experiments.handmade import record_of

cost = Cost()


def measured(task: Task, cbn: float) -> Record:
    made = records(case_of(task), gn=1.1, cbn=cbn)
    return record_of(task, {"norms": [json.loads(record.record().to_json()) for record in made]})


def test_cases() -> None:
    small, full = ([str(case_of(task)) for task in cost.configs(scale)] for scale in (Scale.SMALL, Scale.FULL))
    assert small == [f"resnet18, input 3x{size}x{size}, batch 4, window 4" for size in (64, 112)]
    assert full == ["resnet50, input 3x224x224, batch 4, window 4"]
    assert case_of(cost.configs(Scale.SMALL)[0]).norms == ("bn", "gn", "cbn")


def test_rows_are_norms_with_the_repetitions_pooled() -> None:
    tasks = cost.configs(Scale.FULL, 2)
    bn, gn, cbn, *known = cost.rows([measured(tasks[0], 1.2), measured(tasks[1], 1.4)])
    assert [row.name for row in (bn, gn, cbn)] == [f"resnet50, 224 px: {norm}" for norm in ("BN", "GN", "CBN")]
    assert bn.ours["training"].mean == pytest.approx(100)
    assert bn.ours["training_ratio"].mean == 1
    assert gn.ours["training"].mean == pytest.approx(100 / 1.1)
    assert cbn.ours["training_ratio"] == pytest.approx((1.3, 0.02**0.5))
    assert not cbn.paper
    assert [row.name for row in known] == [f"paper, Mask R-CNN: {norm}" for norm in ("BN", "GN", "CBN")]
    assert known[2].ours["training_ratio"].mean == pytest.approx(1.3)
    assert known[2].ours["memory"].mean == 15_100
    assert cost.rows([]) == []
    assert {measure.name for measure in cost.measures} == cbn.ours.keys()


def test_work_is_the_cost_tool_s(monkeypatch: pytest.MonkeyPatch) -> None:
    task = cost.configs(Scale.SMALL)[0]

    def pretend(case: object, watch: object) -> object:
        assert case == case_of(task)
        assert callable(watch)
        watch("round 1")
        return records(case_of(task), cbn=1.25)

    monkeypatch.setattr("crossbn.lab.cost.measuring.measure", pretend)
    news: list[Progress] = []
    _, _, cbn, *_ = cost.rows([record_of(task, cost.work(task, news.append))])
    assert news == [Progress(0.0, "round 1")]
    assert cbn.ours["training_ratio"].mean == 1.25


def test_estimate_grows_with_the_image() -> None:
    small, large = map(cost.estimate_seconds, cost.configs(Scale.SMALL))
    assert 2.5 < large / small < 4  # 112 px have (112 / 64)^2 = 3.06 times the pixels
