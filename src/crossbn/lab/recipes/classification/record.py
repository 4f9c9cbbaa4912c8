"""What came of a training, as a line of JSON with everything that is needed to repeat it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from crossbn.lab.cost import surroundings
from crossbn.lab.recipes.classification.recipe import Outcome

_PACKAGES = ("lightning", "torchmetrics", "torchvision")


@dataclass(frozen=True)
class Record:
    """A finished training, and what it ran on.

    Attributes:
        outcome: what was asked for, and what came of it.
        processes: that trained side by side.
        device: of the first.
    """

    outcome: Outcome
    processes: int
    device: str

    @property
    def asked(self) -> dict[str, Any]:
        """What equal runs share."""
        return {**self.outcome.recipe.settings(), "processes": self.processes}

    def to_json(self) -> str:
        """Return the record as one line; the recipe's fields stand beside the others."""
        outcome = self.outcome
        return json.dumps(
            {
                **self.asked,
                "window_used": outcome.recipe.effective_window,
                "learning_rate_used": outcome.recipe.effective_learning_rate,
                "accuracy": outcome.accuracy,
                "curve": [point._asdict() for point in outcome.curve],
                "tested_images": outcome.test_images,
                "seconds": outcome.seconds,
                "seconds_per_step": outcome.seconds_per_step,
                "versions": {**surroundings.versions(), **versions_of(_PACKAGES)},
                "machine": surroundings.machine(self.device),
                "commit": surroundings.commit(),
            },
            default=repr,
        )

    def is_in(self, path: Path) -> bool:
        """Tell whether a file of records has one of an equal run."""
        return has_equal_run(path, self.asked)


def has_equal_run(path: Path, asked: Mapping[str, Any]) -> bool:
    """Tell whether a file of records has one of a run that was asked for the same."""
    if not path.exists():
        return False
    told = json.loads(json.dumps(dict(asked), default=repr))
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return any(told.items() <= record.items() for record in found)


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages by name; "" for one that is not installed in the usual way."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found
