"""What it takes to go on with a run: its identity and its random numbers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from crossbn.lab.recipes.asked import Asked
from crossbn.lab.recipes.classification.recipe import OtherRunError

STATE = "classification"
"""The key of a run's state in a checkpoint."""


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of the process's random numbers, of the CPU and of `device`."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """Go on with the random numbers whose state that is."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def identity(recipe: Asked, processes: int) -> str:
    """Return a text that equal runs share."""
    return json.dumps({**recipe.settings(), "processes": processes}, default=repr, sort_keys=True)


def check_checkpoint(path: Path, recipe: Asked, processes: int, state: str = STATE) -> int:
    """Return the step that a checkpoint is of.

    Args:
        path: of the checkpoint.
        recipe: of the run that is to go on.
        processes: that train side by side.
        state: the key of the run's state in the checkpoint, which says what kind of training it is.

    Raises:
        OtherRunError: if it is of another run, or something else.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        told, step = json.loads(found[state]["recipe"]), int(found["global_step"])
    except Exception as error:  # torch raises whatever a file makes it stumble over
        raise OtherRunError(f"{path} is no checkpoint of a {state}: {_first_line(error)}") from error
    asked = json.loads(identity(recipe, processes))
    different = [name for name in asked if told.get(name) != asked[name]]
    if different:
        differences = ", ".join(f"{name} {told.get(name)!r}, not {asked[name]!r}" for name in different)
        raise OtherRunError(f"{path} is of another run: {differences}")
    return step


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
