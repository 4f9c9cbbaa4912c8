"""What a folder tells of a finished run, whatever was trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from crossbn.lab.recipes import classification, detection
from crossbn.lab.recipes.recipe import TrainingRecipe
from crossbn.lab.recipes.training import finished, record_of
from crossbn.lab.records import Record

SCORES = {"AP": 0.25, "APl": None}
MADE = {"versions": {"torch": "2.8"}, "machine": {"cores": "2"}, "commit": "abc"}
OUTCOMES: list[Any] = [
    classification.Outcome(
        classification.Recipe(norm="gn", seed=3), (classification.Point(1.0, 0.5, 0.6, 0.7),), 30, 9.0, 0.02
    ),
    detection.Outcome(detection.Recipe(scales=(48,), seed=3), (detection.Point(1.0, 0.5, SCORES),), 30, 9.0, 0.02, 0.1),
]


def old_line(outcome: Any) -> str:
    """The record as commands have written it before: everything side by side."""
    used = {"window_used": 4, "learning_rate_used": 0.1}
    values = {"curve": [point._asdict() for point in outcome.curve], "tested_images": 30, "seconds": 9.0}
    values |= {"seconds_per_step": 0.02, **outcome.final()}
    values |= {"waiting_share": 0.1} if outcome.recipe.kind == "detect" else {}
    return json.dumps({**outcome.recipe.settings(), "processes": 1, **used, **values, **MADE})


@pytest.mark.parametrize("outcome", OUTCOMES, ids=["classify", "detect"])
def test_records_of_before_are_those_of_finished_runs(outcome: Any, tmp_path: Path) -> None:
    recipe: TrainingRecipe[Any] = outcome.recipe
    (tmp_path / "record.jsonl").write_text(old_line(outcome) + "\n")
    assert finished(recipe, tmp_path, 1) == outcome
    assert finished(recipe, tmp_path, 2) is None
    found = Record.from_json(old_line(outcome))
    assert (found.kind, found.seed, found.environment) == (recipe.kind, 3, MADE)
    assert found.key == record_of(outcome, 1, "cpu").key


@pytest.mark.parametrize("outcome", OUTCOMES, ids=["classify", "detect"])
def test_a_record_tells_what_its_line_told(outcome: Any) -> None:
    record = record_of(outcome, 2, "cpu")
    assert Record.from_json(record.to_json()) == record
    assert record.settings["processes"] == 2
    assert record.values["curve"] == [point._asdict() for point in outcome.curve]
    assert outcome.final().items() <= record.values.items()


def test_records_have_names_of_folders_in_place_of_paths() -> None:
    recipe = detection.Recipe(data="/data/sets/nuclei", backbone_weights="/data/resnet50.pth")
    settings = recipe.portable_settings()
    assert (settings["data"], settings["backbone_weights"]) == ("nuclei", "resnet50.pth")
    assert classification.Recipe(data="cifar10").portable_settings()["data"] == "cifar10"
