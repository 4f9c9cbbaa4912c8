from typing import Any

import pytest

from crossbn.functional import Geometry, choose_plan
from crossbn.functional import storage as plan
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.sampling import Sampling, limited
from crossbn.lab.progress import Progress
from crossbn.lab.records import Record, Task

sampling = Sampling()
LARGE = Geometry(512, 512, kernel=(3, 3))
TINY = {"image_size": 32, "steps": 5, "every": 4}


def errors(naive: float, compensated: float) -> dict[str, float]:
    return {"naive": naive, "compensated": compensated}


def result(samples: int | None, compensated: float, seed: int = 0) -> Record:
    ages: list[Any] = [
        {"same layer": errors(0.2, compensated), "whole network": errors(0.5, 0.4)},
        {"same layer": errors(0.4, compensated), "whole network": errors(0.7, 0.6)},
        {"same layer": errors(0.6, compensated), "whole network": errors(0.9, 0.8)},
    ]
    values = {"samples": samples, "ages": ages, "final_loss": 0.7}
    return Record("sampling", f"{samples}", seed, {}, {**values, "seconds": 1.0})


def test_rows_are_choices_side_by_side() -> None:
    few, everything = sampling.rows([result(10, 0.1), result(10, 0.2, seed=1), result(None, 0.05)])
    assert {measure.name for measure in sampling.measures} == few.ours.keys() == everything.ours.keys() | {"samples"}
    assert few.ours["samples"].mean == 10
    assert few.ours["layer_compensated"] == pytest.approx((0.15, 0.005**0.5))
    assert few.ours["explained_1"].mean == pytest.approx(0.25)
    assert [everything.ours[f"explained_{age}"].mean for age in (1, 2, 3)] == pytest.approx(
        [0.75, 0.875, 1 - 0.05 / 0.6]
    )
    assert everything.ours["layer_naive"].mean == pytest.approx(0.4)
    assert everything.ours["network_naive"].mean == pytest.approx(0.7)
    assert everything.ours["network_compensated"].mean == pytest.approx(0.6)


def test_the_limit_is_put_back_whatever_happens() -> None:
    before = plan._WINDOW_SAMPLES, plan._FEWEST_SAMPLES
    with limited(None):
        assert before == (plan._WINDOW_SAMPLES, plan._FEWEST_SAMPLES)
    for asked, taken in ((8, 2), (384, 128), (10_000, 128)):
        with limited(asked):
            assert choose_plan(LARGE, 128, slots=3).positions == taken
    with pytest.raises(KeyError), limited(1):
        raise KeyError
    assert before == (plan._WINDOW_SAMPLES, plan._FEWEST_SAMPLES)


def test_a_run_takes_the_samples_it_says() -> None:
    first, *_, last = sampling.configs(Scale.SMALL)
    assert (first.name, last.name) == ("16 positions", "128 positions, 384 a window")
    news: list[Progress] = []
    values = sampling.work(Task("sampling", last.name, 3, {**last.settings, **TINY}), news.append)
    assert values["samples"] == 128
    assert [each.share for each in news] == pytest.approx([step / 5 for step in range(1, 6)])
    assert f"loss {values['final_loss']:.3f}" == news[-1].phrase
    assert len(values["ages"]) == 3
    for found in values["ages"]:
        assert found["same layer"]["naive"] > found["same layer"]["compensated"] > 0
        assert found["whole network"]["naive"] > 0
