"""The tables of detection: their runs, their rows, and one small run for real."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from crossbn.lab.data import FOLDER_VARIABLE
from crossbn.lab.experiments import detection, paper
from crossbn.lab.experiments.coco import TABLES
from crossbn.lab.experiments.detection import DetectionCell, data_of, estimate_seconds, find_data, recipe_of
from crossbn.lab.experiments.experiment import Scale, UnavailableError
from crossbn.lab.progress import Progress
from crossbn.lab.recipes.detection import Recipe
from crossbn.lab.recipes.detection.networks import build_network
from crossbn.lab.records import Record, Task
from tests.lab.experiments.handmade import record_of
from tests.lab.recipes.detection.runs import write_folder

TINY = {"image_size": 64, "channels": 8, "proposals": 8, "epochs": 1}


@pytest.fixture(autouse=True)
def _no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "nothing"))


def result(task: Task, score: float) -> Record:
    scores = {"AP": score, "AP50": 0.6, "APl": None}
    return record_of(task, {"scores": scores, "seconds_per_step": 0.5})


def test_rows_are_scores_in_percent_with_the_papers_beside_them() -> None:
    table = TABLES["coco_norms"]
    results = [
        result(task, 0.3 + 0.01 * (task.settings["norm"] == "cbn") + 0.001 * task.seed)
        for task in table.configs(Scale.SMALL)
    ]
    rows = {row.name: row for row in table.rows(results)}
    assert list(rows) == [
        *(f"fixed BN, {norm}" for norm in ("none", "BN", "GN", "BRN", "CBN")),
        "BN, BN",
        "CBN, CBN",
    ]
    assert rows["fixed BN, BN"].ours["AP"].mean == pytest.approx(30.1)
    assert "APl" not in rows["BN, BN"].ours
    assert rows["BN, BN"].paper["AP"] == 35.5
    assert rows["fixed BN, BN"].remark == "-1.0 ± 0.0 to fixed BN, CBN"


def test_the_same_training_is_one_run_in_all_tables() -> None:
    keys = {name: {task.key for task in table.configs(Scale.SMALL, 1)} for name, table in TABLES.items()}
    assert len(keys["coco_norms"] & keys["coco_window"]) == 4  # BN and CBN, in the heads and everywhere
    assert len(keys["coco_norms"] & keys["coco_backbones"]) == 3
    assert len(keys["coco_norms"] & keys["coco_burn_in"]) == 1
    assert not keys["coco_norms"] & keys["coco_switch"]  # two processes
    assert len(keys["coco_norms"] & keys["coco_pyramid"]) == 3
    (told,) = (task for task in TABLES["coco_pyramid"].configs(Scale.SMALL, 1) if "prior" in task.name)
    assert told.name == "CBN everywhere, window 8, prior, plain pyramid"
    assert (told.settings["norm_options"], told.settings["plain_pyramid"]) == ({"prior": "running"}, True)


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_the_paper_are_those_of_full_scale(name: str) -> None:
    cells = TABLES[name].cells(Scale.FULL)
    assert set(paper.numbers(name)) <= set(cells)
    assert all(task.settings["processes"] == 4 for task in TABLES[name].configs(Scale.FULL))


def test_the_papers_tables_agree_where_they_share_a_row() -> None:
    norms, backbones = paper.numbers("coco_norms"), paper.numbers("coco_backbones")
    for norm in ("GN", "SyncBN", "CBN"):
        assert norms[f"fixed BN, {norm}"] == backbones[f"Faster R-CNN, ResNet-50, {norm}"]


def test_full_scale_is_the_papers_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (task,) = (task for task in TABLES["coco_norms"].configs(Scale.FULL) if task.name == "CBN in the heads, window 4")
    recipe = recipe_of(task.settings, 0)
    weights = str(tmp_path / "resnet50.pth")
    options = {"weights": "equal", "positions": None}
    assert recipe == Recipe(data="coco", backbone_weights=weights, norm_options=options, window=4)
    with pytest.raises(UnavailableError, match="coco is not in"):
        TABLES["coco_norms"].check([task])
    (tmp_path / "coco").mkdir()
    with pytest.raises(UnavailableError, match=r"ImageNet's weights, which are looked for in .*resnet50\.pth"):
        TABLES["coco_norms"].check([task])


def test_images_are_a_folders_the_nuclei_or_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_of(Scale.SMALL) == "shapes"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "dsb2018_nuclei").mkdir()
    assert data_of(Scale.SMALL) == "dsb2018_nuclei"
    folder = write_folder(tmp_path / "mine")
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    assert data_of(Scale.SMALL) == "mine"
    assert recipe_of(DetectionCell("bn").settings(Scale.SMALL) | {"data": "mine"}, 0).data == str(folder)


def test_a_folder_of_choice_is_looked_through_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "mine")
    assert find_data(str(folder)) == folder.resolve()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert find_data("mine") == folder.resolve()
    settings = DetectionCell("bn").settings(Scale.SMALL) | {"data": "mine"}
    assert recipe_of(settings, 0).data == str(folder)
    # Four images to train on, four times, and four to test on.
    assert estimate_seconds(Task("detection", "", 0, settings)) == pytest.approx(4 * 4 * 0.1 + 4 * 0.07)
    for name, problem in {"no_such": "no folder no_such", "coco": "taken for other data", ".": "has no COCO"}.items():
        with pytest.raises(UnavailableError, match=problem):
            find_data(name)


@pytest.mark.parametrize(("where", "momentum"), [("heads", 0.01), ("all", 0.1)])
def test_small_scale_adapts_the_backbone(where: str, momentum: float) -> None:
    recipe = recipe_of({"data": "shapes", **DetectionCell("bn", where).settings(Scale.SMALL)}, 0)
    network: Any = build_network(recipe, classes=3)
    body, pyramid = network.backbone.body, network.backbone.fpn
    # Fixed norms keep their weights company, others are soon up to date.
    assert any(each.requires_grad for each in body.parameters()) == (where == "all")
    assert all(each.requires_grad for each in pyramid.parameters())
    norms = [each for each in body.modules() if isinstance(each, nn.BatchNorm2d)]
    assert [each.momentum for each in norms] == [pytest.approx(momentum)] * len(norms)


def tiny(cell: DetectionCell) -> Task:
    cell = replace(cell, changes={**cell.changes, **TINY})
    settings = {"data": "shapes", **cell.settings(Scale.SMALL), "train_images": 4, "test_images": 2}
    return Task("detection", cell.name, 0, settings)


def test_a_run(tmp_path: Path) -> None:
    values = detection.work(tiny(DetectionCell("cbn", window=2)), lambda _: None, tmp_path / "run")
    assert values["test_images"] == 2
    assert values["scores"] == values["curve"][-1]["scores"]
    assert 0 <= values["waiting_share"] < 1


@pytest.mark.slow
def test_a_run_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    heard: list[Progress] = []
    cell = DetectionCell("bn", switch=0.5, changes={"processes": 2})
    values = detection.work(tiny(cell), heard.append, tmp_path / "run")
    assert values["test_images"] == 2
    assert values["scores"]["AP"] is not None
