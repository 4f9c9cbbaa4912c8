"""What a checkpoint of a classification holds besides what the engine and the norms put there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossbn.integrations.engine import Callback, Trainer
from crossbn.integrations.processes import gather
from crossbn.recipes.classification.clock import Clock
from crossbn.recipes.classification.module import Classifier
from crossbn.recipes.classification.order import mix
from crossbn.recipes.classification.recipe import OtherRunError, Point, Recipe
from crossbn.recipes.classification.tally import Tally

_KEY = "classification"


class RunState(Callback):
    """Keeps the curve, the sums since its last point, random numbers and times in checkpoints.

    The order of images and their augmentation are functions of the seed and the step, and need no keeping. The random
    numbers of the process are for the model alone, dropout for instance.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self._random: list[Tensor] | None = None

    def on_train_start(self, trainer: Trainer, module: Classifier) -> None:
        """Begin with random numbers of this seed and process, or go on with them."""
        if self._random is None:
            torch.manual_seed(mix(module.recipe.seed, trainer.global_rank))
            return
        torch.set_rng_state(self._random[0])
        if module.device.type == "cuda":
            torch.cuda.set_rng_state(self._random[1], module.device)

    def on_save_checkpoint(self, trainer: Trainer, module: Classifier, checkpoint: dict[str, Any]) -> None:
        """Add the state of the run."""
        random = [torch.get_rng_state()]
        if module.device.type == "cuda":
            random.append(torch.cuda.get_rng_state(module.device))
        checkpoint[_KEY] = {
            "recipe": identity(module.recipe, trainer.world_size),
            "curve": [list(point) for point in module.curve],
            "seconds": self.clock.seconds,
            "seconds_per_step": self.clock.seconds_per_step,
            "processes": gather({"tally": module.tally.sums(), "random": random}),
        }

    def on_load_checkpoint(self, trainer: Trainer, module: Classifier, checkpoint: dict[str, Any]) -> None:
        """Take it over."""
        saved = checkpoint[_KEY]
        own = saved["processes"][trainer.global_rank]
        module.curve[:] = [Point(*point) for point in saved["curve"]]
        module.tally = Tally.of(own["tally"], trainer.strategy.root_device)
        self.clock.go_on(saved["seconds"], saved["seconds_per_step"])
        self._random = own["random"]


def identity(recipe: Recipe, processes: int) -> str:
    """Return a text that equal runs share."""
    return json.dumps({**recipe.settings(), "processes": processes}, default=repr, sort_keys=True)


def check_checkpoint(path: Path, recipe: Recipe, processes: int) -> int:
    """Return the step that a checkpoint is of.

    Raises:
        OtherRunError: if it is of another run, or something else.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        told, step = json.loads(found[_KEY]["recipe"]), int(found["global_step"])
    except Exception as error:  # torch raises whatever a file makes it stumble over
        raise OtherRunError(f"{path} is no checkpoint of a classification: {_first_line(error)}") from error
    asked = json.loads(identity(recipe, processes))
    different = [name for name in asked if told.get(name) != asked[name]]
    if different:
        differences = ", ".join(f"{name} {told.get(name)!r}, not {asked[name]!r}" for name in different)
        raise OtherRunError(f"{path} is of another run: {differences}")
    return step


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
