"""What came of a training, as a line of JSON with everything that is needed to repeat it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossbn.lab.cost import surroundings
from crossbn.lab.recipes.classification.record import has_equal_run, versions_of
from crossbn.lab.recipes.detection.recipe import Outcome

_PACKAGES = ("lightning", "torchmetrics", "torchvision", "pycocotools", "faster-coco-eval")


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
                "learning_rate_used": outcome.recipe.effective_learning_rate(self.processes),
                "scores": dict(outcome.scores),
                "curve": [point._asdict() for point in outcome.curve],
                "tested_images": outcome.test_images,
                "seconds": outcome.seconds,
                "seconds_per_step": outcome.seconds_per_step,
                "waiting_share": outcome.waiting_share,
                "versions": {**surroundings.versions(), **versions_of(_PACKAGES)},
                "machine": surroundings.machine(self.device),
                "commit": surroundings.commit(),
            },
            default=repr,
        )

    def is_in(self, path: Path) -> bool:
        """Tell whether a file of records has one of an equal run."""
        return has_equal_run(path, self.asked)
