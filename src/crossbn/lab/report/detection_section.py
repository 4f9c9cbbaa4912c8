"""Records of `crossbn train detect` as a section of a page: all trainings of a folder side by side."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossbn.lab.experiments.rows import Spread
from crossbn.lab.report.comparison import write_spread
from crossbn.lab.report.context import origin, surroundings
from crossbn.lab.report.page import Section
from crossbn.lab.report.settings import common, settings_table
from crossbn.lab.report.table import Table
from crossbn.lab.report.training_records import settings_used
from crossbn.lab.report.training_section import group_by_settings

_OUTCOME = ("seed", "curve", "scores", "seconds", "seconds_per_step", "waiting_share", "versions", "machine", "commit")


@dataclass(frozen=True)
class DetectorTraining:
    """A finished training of a detector.

    Attributes:
        settings: everything that it was told but the seed, by name.
        seed: of what is random in it.
        scores: at the end, 0 to 1, by name.
        train_loss: at the end.
        seconds: wall-clock time.
        waiting_share: of the time of training, what was spent waiting for images.
        versions: of the software, by name.
        machine: what it computes with.
        commit: state of the source; "" if it is not known.
    """

    settings: Mapping[str, Any]
    seed: int
    scores: Mapping[str, float | None]
    train_loss: float
    seconds: float
    waiting_share: float
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    commit: str

    @property
    def key(self) -> str:
        """A text that trainings share which differ in their seed only."""
        return json.dumps(self.settings, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> "DetectorTraining":
        """Return the training that a line tells.

        Raises:
            ValueError: if the line is not JSON, or the curve has no point.
            KeyError: if it lacks a field.
            TypeError: if a field is something else.
        """
        found = json.loads(line)
        if not found["curve"]:
            raise ValueError("a training has one measurement at least")
        names = ("seed", "scores", "seconds", "waiting_share", "versions", "machine")
        settings = settings_used({name: value for name, value in found.items() if name not in _OUTCOME})
        told = {name: found[name] for name in names}
        return cls(settings, train_loss=found["curve"][-1]["train_loss"], commit=str(found.get("commit") or ""), **told)


def detection_section(trainings: Sequence[DetectorTraining], name: str) -> Section:
    """Return the section of trainings of detectors.

    Args:
        trainings: the later one counts of two that are the same.
        name: of the files that they are from.
    """
    latest = list({(training.key, training.seed): training for training in trainings}.values())
    groups = group_by_settings(latest)
    scores = list(dict.fromkeys(score for training in latest for score in training.scores))
    columns = ("", "n", *(f"{score}, %" for score in scores), "train loss", "waiting for images, %", "seconds")
    rows = tuple((label, *_cells(group, scores)) for label, group in groups.items())
    differing = settings_table({label: group[0].settings for label, group in groups.items()})
    return Section(
        title="Detectors" if len(groups) > 1 else f"Detector: {next(iter(groups))}",
        tables=[Table("At the end of training, mean ± standard deviation over n seeds", columns, rows)],
        notes=[
            "AP is COCO's average precision on the test images, over overlaps of 0.5 to 0.95, at 0.5, at 0.75, and of "
            "small, medium and large objects. Seconds are wall-clock time of a run."
        ],
        settings={
            **common([training.settings for training in latest]),
            **surroundings(latest),
            **origin(name, len(latest), sum(training.seconds for training in latest)),
        },
        setting_tables=[] if differing is None else [differing],
    )


def _cells(group: Sequence[DetectorTraining], scores: Sequence[str]) -> list[str]:
    found = [[value for training in group if (value := training.scores.get(score)) is not None] for score in scores]
    return [
        str(len(group)),
        *(write_spread(Spread.of([100 * value for value in each]) if each else None, ".1f") for each in found),
        write_spread(Spread.of([training.train_loss for training in group]), ".3f"),
        write_spread(Spread.of([100 * training.waiting_share for training in group]), ".1f"),
        write_spread(Spread.of([training.seconds for training in group]), ".0f"),
    ]
