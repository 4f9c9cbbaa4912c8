"""Putting the norm of a recipe into its network."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from crossbn.compat import ensure_torchvision
from crossbn.integrations.engine import Callback
from crossbn.integrations.lightning import CrossIterationNorm
from crossbn.lab.recipes.classification.networks import Block, is_small
from crossbn.lab.recipes.classification.order import Plan
from crossbn.lab.recipes.classification.recipe import CROSS_ITERATION, NORM_ACTIVATIONS, Recipe, RecipeError
from crossbn.nn import NORMS, RenormSchedule, reparametrize_
from crossbn.swap import swap_norm_

# Batch Renormalization's ramps end at 40,000 steps; a run of fewer than four times as many has them shortened.
_RENORM_STEPS = 160_000


def default_options(recipe: Recipe, norm: str, forwards: int) -> dict[str, Any]:
    """Return the options of a norm that follow the run, where the recipe does not give them.

    - "gn" and "evonorm_s0" have 32 groups, their papers' number, and `width / 2`, at most 32, in our small networks: 32
      groups of one or two channels would be instance normalization.
    - "ssn" chooses at the end of the run, as in its paper.
    - "brn" has its paper's ramps, shortened in proportion in runs of fewer than 160,000 forwards.

    Args:
        recipe: of the run.
        norm: one of `crossbn.nn.NORMS`.
        forwards: training forwards of a process.
    """
    if norm in ("gn", "evonorm_s0"):
        return {"groups": max(1, min(32, recipe.width // 2)) if is_small(recipe.model) else 32}
    return scheduled_options(norm, forwards)


def scheduled_options(norm: str, forwards: int) -> dict[str, Any]:
    """Return the options of a norm that follow the length of a training."""
    if norm == "ssn":
        return {"steps": forwards}
    if norm == "brn":
        return {"schedule": RenormSchedule().scaled(min(1.0, forwards / _RENORM_STEPS))}
    return {}


def give_norm_(network: nn.Module, recipe: Recipe, plan: Plan) -> Callback | None:
    """Turn the batch norms of `network` into the recipe's norm, and reparametrize its weights.

    Returns:
        The callback that the norms need in training, if they need one.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    options = {**default_options(recipe, recipe.norm, plan.forwards), **as_torch_has_them(recipe.norm_options)}
    with options_blamed(recipe.norm):
        if recipe.reparametrize is not None:
            reparametrize_(network, recipe.reparametrize)
        if recipe.norm in CROSS_ITERATION:
            callback = _cross_iteration(recipe, options, round(recipe.burn_in_epochs * plan.steps_per_epoch))
            callback.convert_(network)
            return callback
        if recipe.norm in NORM_ACTIVATIONS:
            _give_norm_activations_(network, recipe, options)
        elif recipe.norm != "bn" or options:
            swap_norm_(network, recipe.norm, **options)
    return None


def _give_norm_activations_(network: nn.Module, recipe: Recipe, options: Mapping[str, Any]) -> None:
    """Put timm's layers in the places of norms, and of the activations behind them; those before a sum have none."""
    if not any(isinstance(part, Block) and not part.norm_last for part in network.modules()):
        raise RecipeError(f"{recipe.norm} is for our small residual networks, got {recipe.model}")
    ensure_torchvision()  # timm imports it
    from timm.layers.evo_norm import EvoNorm2dS0
    from timm.layers.filter_response_norm import FilterResponseNormTlu2d

    kind: Any = {"evonorm_s0": EvoNorm2dS0, "frn_tlu": FilterResponseNormTlu2d}[recipe.norm]
    for parent in list(network.modules()):
        children = list(parent.named_children())
        for (name, norm), (next_name, behind) in pairwise([*children, ("", None)]):
            if isinstance(norm, nn.BatchNorm2d):
                activates = isinstance(behind, nn.ReLU)
                setattr(parent, name, kind(norm.num_features, apply_act=activates, **options))
                if activates:
                    setattr(parent, next_name, nn.Identity())


def _cross_iteration(recipe: Recipe, options: Mapping[str, Any], burn_in_steps: int) -> CrossIterationNorm:
    order = {"order": 0} if recipe.norm == "naive_cbn" else {}
    return CrossIterationNorm(**{"window": recipe.effective_window, **order, **options}, burn_in_steps=burn_in_steps)


def switch_norm_(network: nn.Module, recipe: Recipe, plan: Plan) -> None:
    """Turn the norms of a network in training into the recipe's other norm; parameters stay the same ones.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    assert recipe.switch_norm is not None
    given = as_torch_has_them(recipe.switch_options)
    options = {**default_options(recipe, recipe.switch_norm, plan.forwards), **given}
    if recipe.switch_norm in CROSS_ITERATION:
        options = {"window": recipe.effective_window, **options}
    with options_blamed(recipe.switch_norm):
        swap_norm_(network, recipe.switch_norm, **options)


def as_torch_has_them(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are, but for a type given by name, as records and commands have it."""
    return {
        name: getattr(torch, value, value) if name == "history_dtype" and isinstance(value, str) else value
        for name, value in options.items()
    }


@contextmanager
def options_blamed(norm: str) -> Iterator[None]:
    """Raise RecipeError, with the name of the norm, for what its options make it raise."""
    try:
        yield
    except (TypeError, ValueError) as error:
        title = NORM_ACTIVATIONS[norm] if norm in NORM_ACTIVATIONS else NORMS[norm].title
        raise RecipeError(f"{title}: {error}") from error
