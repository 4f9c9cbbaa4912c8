from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossbn.lab.data import DataError
from crossbn.lab.experiments import classification
from crossbn.lab.experiments.cells import Cell, cbn, exact, plain
from crossbn.lab.experiments.classification import (
    check,
    estimate_seconds,
    make_tasks,
    recipe_of,
    scale_of,
    settings_of,
    work,
)
from crossbn.lab.experiments.experiment import Scale, UnavailableError
from crossbn.lab.fidelity.bound import ExactWindow
from crossbn.lab.progress import Progress
from crossbn.lab.recipes import classification as recipes
from crossbn.lab.recipes.classification import Machine, Outcome, Point, Recipe
from crossbn.lab.recipes.classification import Progress as Told
from crossbn.lab.records import Task
from tests.lab.experiments.classified import result


def task_of(cell: Cell, scale: Scale = Scale.SMALL) -> Task:
    return make_tasks([cell], scale, 1)[0]


def test_full_scale_is_the_paper_s_recipe() -> None:
    recipe = recipe_of(task_of(cbn(4), Scale.FULL))
    assert (recipe.data, recipe.model, recipe.epochs, recipe.augment) == ("imagenet", "resnet18", 100, True)
    assert (recipe.batch_size, recipe.effective_window, recipe.burn_in_epochs) == (4, 4, 25)
    assert (recipe.learning_rate, recipe.momentum, recipe.weight_decay) == (0.1 * 4 / 32, 0.9, 1e-4)
    assert recipe.train_images is recipe.test_images is recipe.image_size is None
    assert recipe.wrap is None
    assert dict(recipe.norm_options) == {"weights": "equal", "positions": None}  # all of them, as in the paper


def test_small_scale_is_the_same_recipe_on_less() -> None:
    recipe = recipe_of(task_of(cbn(2, order=2)))
    assert (recipe.data, recipe.model) == ("cifar10", "resnet8")
    assert (recipe.batch_size, recipe.effective_window, recipe.learning_rate) == (2, 8, 0.1 * 2 / 32)
    assert recipe.burn_in_epochs == recipe.epochs / 4
    assert dict(recipe.norm_options) == {"weights": "equal", "order": 2, "positions": 128}
    naive = recipe_of(task_of(cbn(2, order=0)))
    assert (naive.norm, naive.effective_window, dict(naive.norm_options)) == ("naive_cbn", 8, {"weights": "equal"})


def test_norms_of_one_step_are_told_no_window() -> None:
    recipe = recipe_of(task_of(plain("gn", 2)))
    assert (recipe.norm, recipe.window, recipe.burn_in_epochs, dict(recipe.norm_options)) == ("gn", None, 0, {})


def test_runs_are_filed_together_and_once() -> None:
    tasks = make_tasks([cbn(2), plain("bn", 16), cbn(16), cbn(2, 8)], Scale.SMALL, 2)
    assert [(task.kind, task.name, task.seed) for task in tasks] == [
        *(("classification", "CBN, batch 2, window 8", seed) for seed in (0, 1)),
        *(("classification", "BN, batch 16", seed) for seed in (0, 1)),
    ]
    assert {recipe_of(task).seed for task in tasks} == {0, 1}


def test_scale_is_told_by_the_images() -> None:
    assert [scale_of([result(task_of(cbn(2), scale), 0.5)]) for scale in Scale] == list(Scale)
    assert scale_of([]) is Scale.SMALL


def test_exact_statistics_wrap_the_network_for_as_long_as_the_norm_pools() -> None:
    recipe = recipe_of(task_of(exact(2, "own")))
    assert (recipe.norm, recipe.window) == ("bn", None)
    assert recipe.wrap is not None
    wrapped = recipe.wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), recipe)
    assert isinstance(wrapped, ExactWindow)
    assert recipe.train_images is not None
    assert wrapped.burn_in == recipe.train_images // 2 * recipe.epochs // 4
    assert wrapped.window == 8


def test_exact_statistics_know_how_many_images_there_are_at_full_scale() -> None:
    recipe = recipe_of(task_of(exact(4, "full"), Scale.FULL))
    assert recipe.wrap is not None
    wrapped = recipe.wrap(nn.Linear(2, 3), recipe)
    assert isinstance(wrapped, ExactWindow)
    assert wrapped.burn_in == 25 * (1_281_167 // 4)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(nn.Linear(512 * 49, 8), nn.Linear(8, 10))


def test_a_pooled_head_is_one_linear_layer() -> None:
    recipe = recipe_of(task_of(Cell("bn", 4, changes={"head": "pooled"})))
    assert recipe.wrap is not None
    network = recipe.wrap(Head(), recipe)
    pool, classifier = network.avgpool, network.classifier
    assert isinstance(pool, nn.Module)
    assert isinstance(classifier, nn.Linear)
    assert classifier(pool(torch.randn(2, 512, 1, 1)).flatten(1)).shape == (2, 10)


def test_work_trains_the_recipe_and_returns_its_curve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Recipe, Path | None]] = []

    def train(recipe: Recipe, folder: Path | None, watch: Callable[[Any], None], machine: Machine) -> Outcome:
        assert machine.keep_going  # a training that diverges is a result, too
        asked.append((recipe, folder))
        watch(Told(0.5, "loss 1.234"))
        watch(Point(1.0, 1.2, 0.4, 0.5))
        return Outcome(recipe, (Point(1.0, 1.2, 0.4, 0.5), Point(2.0, 1.0, 0.6, 0.7)), 300, 9.0, 0.02)

    monkeypatch.setattr(recipes, "train", train)
    news: list[Progress] = []
    task = task_of(cbn(2))
    values = work(task, news.append, tmp_path / "run")
    assert asked == [(recipe_of(task), tmp_path / "run")]
    assert news == [Progress(0.5, "loss 1.234")]
    assert (values["accuracy"], values["test_images"], values["seconds_per_step"]) == (0.7, 300, 0.02)
    assert values["curve"][1] == {"epoch": 2.0, "train_loss": 1.0, "train_accuracy": 0.6, "test_accuracy": 0.7}


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cbn(4), exact(4, "own")], ids=lambda cell: cell.name)
def test_a_real_run_that_is_interrupted_goes_on_bit_for_bit(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossbn.lab.recipes.clock._SECONDS_BETWEEN_NEWS", 0.0)  # news of every step
    changes = {"data": "digits", "train_images": 80, "test_images": 40, "epochs": 2, "points": 4}
    task = task_of(replace(cell, changes=changes))
    whole = work(task, lambda _: None)
    assert [point["epoch"] for point in whole["curve"]] == [0.5, 1.0, 1.5, 2.0]
    assert whole["accuracy"] == whole["curve"][-1]["test_accuracy"]
    assert whole["test_images"] == 40

    def interrupt(news: Progress) -> None:
        if news.share > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(task, interrupt, tmp_path / "run")
    news: list[Progress] = []
    assert work(task, news.append, tmp_path / "run")["curve"] == whole["curve"]
    assert news[0].share > 0.5  # it did not begin again


def test_what_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[str, bool]] = []

    def load(name: str, train: bool) -> None:
        looked.append((name, train))
        if name == "cifar10":
            raise DataError("CIFAR-10 is nowhere")

    monkeypatch.setattr(classification, "load_pictures", load)
    digits = Cell("bn", 4, changes={"data": "digits"}, prefix="digits: ")
    check([task_of(digits), task_of(digits)])
    assert looked == [("digits", True), ("digits", False)]
    with pytest.raises(UnavailableError, match="CIFAR-10 is nowhere"):
        check([task_of(cbn(2))])
    monkeypatch.setattr(classification, "find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match=r"trainings need lightning: pip install '\.\[train\]'"):
        check([task_of(digits)])


def test_imagenet_is_looked_for_at_full_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSBN_DATA", str(tmp_path))
    with pytest.raises(UnavailableError, match="ImageNet"):
        check([task_of(cbn(4), Scale.FULL)])


def test_estimates_follow_the_work() -> None:
    cells = [plain("bn", 32), plain("bn", 2), cbn(2), exact(2, "full"), plain("bn", 1)]
    seconds = {cell.name: estimate_seconds(task_of(cell)) for cell in cells}
    assert 1 < seconds["BN, batch 32"] < seconds["BN, batch 2"] < seconds["CBN, batch 2, window 8"] < 3600
    assert seconds["BN, batch 2"] < seconds["BN, batch 1"]
    assert seconds["BN, batch 2"] < seconds["exact, full gradient, batch 2, window 8"]
    assert estimate_seconds(task_of(cbn(4), Scale.FULL)) > 86400


def test_settings_are_all_in_the_task() -> None:
    settings = settings_of(cbn(2), Scale.SMALL)
    told = {**settings, "seed": 0}
    left_out = {"validate", "reparametrize", "accumulate", "precision", "switch_norm", "switch_epoch", "switch_options"}
    assert recipe_of(task_of(cbn(2))).settings().keys() - left_out <= told.keys()
