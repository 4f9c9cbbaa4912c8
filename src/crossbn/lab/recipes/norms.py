"""Putting the norm of a recipe into its network, and another one in the midst of training."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from crossbn.integrations.engine import Callback
from crossbn.integrations.lightning import CrossIterationNorm
from crossbn.lab.norm_names import CROSS_ITERATION
from crossbn.lab.recipes.order import Plan
from crossbn.lab.recipes.recipe import TrainingRecipe, as_torch_has_them, options_blamed
from crossbn.nn import NORMS, RenormSchedule
from crossbn.swap import SwapReport, swap_norm_

# Batch Renormalization's ramps end at 40,000 steps; a run of fewer than four times as many has them shortened.
_RENORM_STEPS = 160_000


def scheduled_options(norm: str, forwards: int) -> dict[str, Any]:
    """Return the options of a norm that follow the length of a training.

    - "ssn" chooses at the end of the run, as in its paper.
    - "brn" has its paper's ramps, shortened in proportion in runs of fewer than 160,000 forwards.
    """
    if norm == "ssn":
        return {"steps": forwards}
    if norm == "brn":
        return {"schedule": RenormSchedule().scaled(min(1.0, forwards / _RENORM_STEPS))}
    return {}


def put_norm_(network: nn.Module, recipe: TrainingRecipe[Any], plan: Plan) -> Callback | None:
    """Turn the batch norms of `network` into the recipe's norm.

    Returns:
        The callback that the norms need in training, if they need one.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    options = _options(recipe.norm, recipe.norm_options, recipe, plan)
    with options_blamed(NORMS[recipe.norm].title):
        if recipe.norm in CROSS_ITERATION:
            order = {"order": 0} if recipe.norm == "naive_cbn" else {}
            burn_in = round(recipe.burn_in_epochs * plan.steps_per_epoch)
            callback = CrossIterationNorm(**{**order, **options}, burn_in_steps=burn_in)
            callback.convert_(network)
            return callback
        if recipe.norm != "bn" or options:
            swap_norm_(network, recipe.norm, **options)
    return None


def switch_norm_(network: nn.Module, recipe: TrainingRecipe[Any], plan: Plan) -> SwapReport:
    """Turn the norms of a network in training into the recipe's other norm; fixed ones and parameters stay.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    assert recipe.switch_norm is not None
    options = _options(recipe.switch_norm, recipe.switch_options, recipe, plan)
    with options_blamed(NORMS[recipe.switch_norm].title):
        return swap_norm_(network, recipe.switch_norm, **options)


def _options(norm: str, given: Mapping[str, Any], recipe: TrainingRecipe[Any], plan: Plan) -> dict[str, Any]:
    window = {"window": recipe.effective_window} if norm in CROSS_ITERATION else {}
    own = {**recipe.default_options(norm), **scheduled_options(norm, plan.forwards)}
    return {**window, **own, **as_torch_has_them(given)}
