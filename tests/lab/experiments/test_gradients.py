from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossbn.lab.data import FOLDER_VARIABLE
from crossbn.lab.experiments.experiment import Scale, UnavailableError
from crossbn.lab.experiments.gradients import Gradients, build_classifier
from crossbn.lab.experiments.pictures import batches
from crossbn.lab.fidelity.gradients import average_ratios, gradient_norms
from crossbn.lab.progress import Progress
from crossbn.lab.records import Record, Task
from crossbn.lab.report.experiment_figures import plot_ratios

gradients = Gradients()


def look(step: int, mean: list[float], second_moment: list[float]) -> dict[str, Any]:
    return {"step": step, "layers": 3, "mean": mean, "second_moment": second_moment}


def looked(name: str = "VGG-16", shift: float = 0.0, seed: int = 0) -> Record:
    looks = [
        look(0, [9.0, 9.0], [9.0, 9.0]),
        look(5, [0.1 + shift, 0.3], [0.4, 0.2]),
        look(10, [0.3 + shift, 0.1], [0.6, 0.2]),
    ]
    return Record("gradients", name, seed, {}, {"looks": looks, "final_loss": 0.7, "seconds": 1.0})


def test_rows_average_the_looks_after_the_first() -> None:
    (row,) = gradients.rows([looked(), looked(shift=0.2, seed=1)])
    assert row.ours["mean_1"] == pytest.approx((0.3, 0.02**0.5))
    assert row.ours["second_moment_1"] == pytest.approx((0.5, 0.0))
    assert (row.ours["mean_2"].mean, row.ours["second_moment_2"].mean) == pytest.approx((0.2, 0.2))
    assert row.ours["loss"].mean == pytest.approx(0.7)
    assert row.paper == {"mean_1": 0.20, "second_moment_1": 0.41}
    assert {measure.name for measure in gradients.measures} == row.ours.keys()


def test_the_figure_has_a_panel_for_each_network_and_the_paper_s_lines() -> None:
    figure = plot_ratios([looked("VGG-16"), looked("ResNet-18")])
    vgg, resnet = figure.axes
    assert [axes.get_title("left") for axes in (vgg, resnet)] == ["VGG-16", "ResNet-18"]
    lines = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in vgg.get_lines()}
    assert lines["mean, l-1"] == [9.0, 0.1, 0.3]
    assert lines["second moment, l-2"] == [9.0, 0.2, 0.2]
    assert vgg.get_ylim()[0] == 0
    assert vgg.get_ylim()[1] > 9  # both panels show all points
    assert lines["second moment, l-1, the paper's"] == [0.41, 0.41]


def test_training_is_looked_at_before_and_after() -> None:
    task = Task("gradients", "ResNet-18", 3, {**gradients.configs(Scale.SMALL)[0].settings, **TINY})
    news: list[Progress] = []
    values = gradients.work(task, news.append)
    first, last = values["looks"]
    assert (first["step"], last["step"], first["layers"]) == (0, 1, 20)
    assert [each.share for each in news] == [1.0]
    assert f"loss {values['final_loss']:.3f}" == news[0].phrase
    torch.manual_seed(3)
    model = build_classifier(task.settings, 3)
    images, _ = next(batches("digits", 32, 2))
    expected = average_ratios(gradient_norms(model, images, probes=1, generator=torch.Generator().manual_seed(3)))
    assert first["mean"] == pytest.approx(expected.mean)
    assert first["second_moment"] == pytest.approx(expected.second_moment)
    assert last["mean"] != first["mean"]


TINY = {"image_size": 32, "batch_size": 2, "steps": 1, "looks": 1, "probes": 1}


def test_small_vgg_has_a_small_head() -> None:
    with torch.device("meta"):
        told = {"model": "vgg16_bn", "data": "digits"}
        own, pooled = (build_classifier({**told, "head": head}) for head in ("own", "pooled"))
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (own, pooled)]
    assert sizes[0] - sizes[1] == sum(p.numel() for p in own.get_submodule("classifier").parameters()) - 5130


def test_the_paper_s_training_needs_imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = gradients.configs(Scale.FULL)
    assert [task.settings["image_size"] for task in tasks] == [224, 224, 299]
    assert tasks[0].settings["steps"] * 32 == pytest.approx(90 * 1_281_167, abs=32)
    gradients.check(gradients.configs(Scale.SMALL))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(UnavailableError, match=f"ImageNet is not in {tmp_path}/imagenet/train"):
        gradients.check(tasks)
    (tmp_path / "imagenet" / "train" / "dogs").mkdir(parents=True)
    with pytest.raises(UnavailableError, match="has 1 classes in place of ImageNet's 1000"):
        gradients.check(tasks)
