"""What it takes to go on with a run: its identity and its random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
from torch import Tensor

from crossbn.integrations.lightning import say
from crossbn.lab.recipes.recipe import OtherRunError, TrainingRecipe
from crossbn.lab.recipes.trainer import Files


class Found(NamedTuple):
    """A checkpoint to go on from."""

    path: Path
    step: int


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of the process's random numbers, of the CPU and of `device`."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """Go on with the random numbers whose state that is."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def identity(recipe: TrainingRecipe[Any], processes: int) -> str:
    """Return a text that equal runs share."""
    return json.dumps({**recipe.settings(), "processes": processes}, default=repr, sort_keys=True)


def find_checkpoint(files: Files, recipe: TrainingRecipe[Any], processes: int, state: str) -> Found | None:
    """Return the latest checkpoint that can be read; None if there is none.

    Args:
        files: of the run.
        recipe: of the run that is to go on.
        processes: that train side by side.
        state: the key of the run's state in the checkpoint, which says what kind of training it is.

    Raises:
        OtherRunError: if it is of another run, or none can be read.
    """
    problems = []
    for path in files.checkpoints:
        if path.exists():
            try:
                _check_sums(path)
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                told, step = json.loads(found[state]["recipe"]), int(found["global_step"])
            except Exception as error:  # torch raises whatever a file makes it stumble over
                problems.append(f"{path} is no checkpoint of a {state}: {_first_line(error)}")
                continue
            _check_same(path, told, json.loads(identity(recipe, processes)))
            for problem in problems:
                say(f"{problem}; going on from {path.name}, the one before it, at step {step}")
            return Found(path, step)
    if problems:
        raise OtherRunError(problems[0])
    return None


def _check_sums(path: Path) -> None:
    """Compare the content of a file with the checksums that it has of itself, which torch does not."""
    with ZipFile(path) as parts:
        if (damaged := parts.testzip()) is not None:
            raise ValueError(f"its part {damaged} is damaged")


def _check_same(path: Path, told: dict[str, Any], asked: dict[str, Any]) -> None:
    different = [name for name in {**told, **asked} if told.get(name) != asked.get(name)]
    if different:
        differences = ", ".join(f"{name} {told.get(name)!r}, not {asked.get(name)!r}" for name in different)
        raise OtherRunError(f"{path} is of another run: {differences}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
