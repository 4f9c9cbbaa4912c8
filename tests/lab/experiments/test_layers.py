from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossbn.convert import cross_iteration_norms
from crossbn.lab.data import DATASETS, FOLDER_VARIABLE
from crossbn.lab.experiments.experiment import Scale, UnavailableError
from crossbn.lab.experiments.layers import Layers, build_model
from crossbn.lab.experiments.two_layer import TwoLayerSegment
from crossbn.lab.progress import Progress
from crossbn.lab.records import Record, Task
from tests.lab.data.tiny import write_black_and_white

layers = Layers()
NAMES = ["BN", "CBN, no compensation", "CBN, one layer", "CBN, two layers"]


def finished(name: str, seed: int, accuracy: float, seconds_per_step: float) -> Record:
    values = {"accuracy": accuracy, "test_images": 797, "final_loss": 0.5, "seconds_per_step": seconds_per_step}
    return Record("layers", name, seed, {}, {**values, "seconds": 1.0})


def shortened(task: Task, **changes: Any) -> Task:
    return Task(task.kind, task.name, task.seed, {**task.settings, **changes})


def test_runs_differ_in_their_norm_alone() -> None:
    for scale in (Scale.SMALL, Scale.FULL):
        tasks = layers.configs(scale, 2)
        assert [task.name for task in tasks[::2]] == NAMES
        rest = [{key: value for key, value in task.settings.items() if key != "norm"} for task in tasks]
        assert all(each == rest[0] for each in rest)
    small, full = (layers.configs(scale)[0].settings for scale in (Scale.SMALL, Scale.FULL))
    assert (small["batch_size"], small["window"], small["steps"]) == (2, 8, 2000)
    assert small["learning_rate"] == pytest.approx(0.025 / 16)
    assert (full["batch_size"], full["window"]) == (4, 4)
    assert full["steps"] * 4 == pytest.approx(90 * 1_281_167, abs=4)


def test_rows_are_norms_with_the_seeds_pooled() -> None:
    one, two = layers.rows(
        [
            *(finished("CBN, one layer", 0, 0.9, 0.01), finished("CBN, one layer", 1, 0.92, 0.03)),
            finished("CBN, two layers", 0, 0.95, 0.1),
        ]
    )
    assert (one.name, two.name) == ("CBN, one layer", "CBN, two layers")
    assert one.ours["accuracy"] == pytest.approx((91, 2**0.5))
    assert one.ours["milliseconds"] == pytest.approx((20, 200**0.5))
    assert two.ours["accuracy"] == pytest.approx((95, None))
    assert two.ours["loss"].mean == 0.5
    assert not two.paper
    assert {measure.name for measure in layers.measures} == two.ours.keys()


def test_two_layers_reach_every_norm_of_the_chain_but_the_first() -> None:
    two = layers.configs(Scale.SMALL)[3]
    norms = cross_iteration_norms(build_model(two.settings)).values()
    assert [isinstance(norm.segments[0], TwoLayerSegment) for norm in norms] == [False, True, True, True]


def test_equal_seeds_give_equal_weights_and_the_norm_asked_for() -> None:
    models = []
    for task in layers.configs(Scale.SMALL):
        torch.manual_seed(task.seed)
        models.append(build_model(task.settings))
    weights = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
    assert all(torch.equal(each, weights[0]) for each in weights)
    assert not cross_iteration_norms(models[0])
    settings = [{norm.settings for norm in cross_iteration_norms(model).values()} for model in models[1:]]
    assert [[(each.window, each.order) for each in found] for found in settings] == [[(8, 0)], [(8, 1)], [(8, 1)]]


def test_a_real_run_of_each_norm() -> None:
    values = []
    for task in layers.configs(Scale.SMALL):
        news: list[Progress] = []
        values.append(layers.work(shortened(task, steps=3), news.append))
        assert [each.share for each in news] == pytest.approx([1 / 3, 2 / 3, 1])
        assert news[-1].phrase == f"loss {values[-1]['final_loss']:.3f}"
        assert values[-1]["test_images"] == 797
        assert 0 <= values[-1]["accuracy"] < 0.5  # three steps teach little
    # Two steps of weights have changed by now: each norm has seen other statistics.
    assert len({each["final_loss"] for each in values}) == 4
    assert values[3]["seconds_per_step"] > values[0]["seconds_per_step"]


def test_estimates_tell_that_two_layers_are_slow() -> None:
    bn, naive, one, two = map(layers.estimate_seconds, layers.configs(Scale.SMALL))
    assert bn == naive == one < two < 1800


def test_the_paper_s_training_needs_imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers.check(layers.configs(Scale.SMALL))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    tasks = layers.configs(Scale.FULL)
    with pytest.raises(UnavailableError, match=f"ImageNet is not in {tmp_path}/imagenet/train"):
        layers.check(tasks)
    monkeypatch.setitem(DATASETS, "imagenet", replace(DATASETS["imagenet"], classes=2))
    write_black_and_white(tmp_path / "imagenet" / "train", (40, 36))
    with pytest.raises(UnavailableError, match=f"ImageNet is not in {tmp_path}/imagenet/val"):
        layers.check(tasks)
    write_black_and_white(tmp_path / "imagenet" / "val", (40, 36))
    layers.check(tasks)
    values = layers.work(shortened(tasks[0], image_size=32, batch_size=2, steps=1), lambda _: None)
    assert values["test_images"] == 2
    assert values["accuracy"] in (0, 0.5, 1)
