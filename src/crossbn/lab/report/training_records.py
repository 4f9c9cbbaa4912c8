"""Trainings of the recipes, as their records tell them: read without the recipes themselves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from crossbn.lab.cost.cases import WINDOWED

_OUTCOME = ("seed", "curve", "accuracy", "seconds", "seconds_per_step", "versions", "machine", "commit")


class Moment(NamedTuple):
    """A measurement during training."""

    epoch: float
    train_loss: float
    train_accuracy: float
    test_accuracy: float


@dataclass(frozen=True)
class Training:
    """A finished training.

    Attributes:
        settings: everything that it was told but the seed, by name.
        seed: of what is random in it.
        curve: measurements; the last is at its end.
        seconds: wall-clock time.
        versions: of the software, by name.
        machine: what it computes with.
        commit: state of the source; "" if it is not known.
    """

    settings: Mapping[str, Any]
    seed: int
    curve: tuple[Moment, ...]
    seconds: float
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    commit: str

    @property
    def key(self) -> str:
        """A text that trainings share which differ in their seed only."""
        return json.dumps(self.settings, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> "Training":
        """Return the training that a line tells.

        Raises:
            ValueError: if the line is not JSON, or the curve has no point.
            KeyError: if it lacks a field.
            TypeError: if a field is something else.
        """
        found = json.loads(line)
        curve = tuple(Moment(**{name: point[name] for name in Moment._fields}) for point in found["curve"])
        if not curve:
            raise ValueError("a training has one measurement at least")
        settings = settings_used({name: value for name, value in found.items() if name not in _OUTCOME})
        commit = str(found.get("commit") or "")
        made = {name: found[name] for name in ("seconds", "versions", "machine")}
        return cls(settings, found["seed"], curve, commit=commit, **made)


def settings_used(told: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as they took effect: a default that follows another setting has what it came to."""
    used = {name.removesuffix("_used"): value for name, value in told.items() if name.endswith("_used")}
    settings = {name: used.get(name, value) for name, value in told.items() if not name.endswith("_used")}
    if "window" in settings and settings["norm"] not in WINDOWED:
        del settings["window"]
    return settings
