import json

import pytest

from crossbn.lab.experiments import cost
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.tasks import News, Result, Task
from tests.lab.cost.handmade import records


def measured(task: Task, cbn: float) -> Result:
    made = records(cost.case_of(task), gn=1.1, cbn=cbn)
    return Result(task, {"norms": [json.loads(record.to_json()) for record in made]}, 1.0)


def test_cases() -> None:
    small, full = ([str(cost.case_of(task)) for task in cost.configs(scale)] for scale in (Scale.SMALL, Scale.FULL))
    assert small == [f"resnet18, input 3x{size}x{size}, batch 4, window 4" for size in (64, 112)]
    assert full == ["resnet50, input 3x224x224, batch 4, window 4"]
    assert cost.case_of(cost.configs(Scale.SMALL)[0]).norms == ("bn", "gn", "cbn")


def test_rows_are_norms_with_the_repetitions_pooled() -> None:
    tasks = cost.configs(Scale.FULL, 2)
    bn, gn, cbn = cost.rows([measured(tasks[0], 1.2), measured(tasks[1], 1.4)])
    assert [row.name for row in (bn, gn, cbn)] == [f"resnet50, 224 px: {norm}" for norm in ("BN", "GN", "CBN")]
    assert bn.ours["training"].mean == pytest.approx(100)
    assert bn.ours["training_ratio"].mean == 1
    assert gn.ours["training"].mean == pytest.approx(100 / 1.1)
    assert cbn.ours["training_ratio"] == pytest.approx((1.3, 0.02**0.5))
    assert not cbn.paper
    assert {measure.name for measure in cost.MEASURES} == cbn.ours.keys()


def test_work_is_the_cost_tool_s(monkeypatch: pytest.MonkeyPatch) -> None:
    task = cost.configs(Scale.SMALL)[0]

    def pretend(case: object, watch: object) -> object:
        assert case == cost.case_of(task)
        assert callable(watch)
        watch("round 1")
        return records(cost.case_of(task), cbn=1.25)

    monkeypatch.setattr(cost, "measure", pretend)
    news: list[News] = []
    (_, _, cbn) = cost.rows([Result(task, cost.work(task, news.append), 1.0)])
    assert news == [News(0.0, "round 1")]
    assert cbn.ours["training_ratio"].mean == 1.25


def test_estimate_grows_with_the_image() -> None:
    small, large = map(cost.estimate_seconds, cost.configs(Scale.SMALL))
    assert 2.5 < large / small < 4  # 112 px have (112 / 64)^2 = 3.06 times the pixels
