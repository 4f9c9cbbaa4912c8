"""Putting the norm of a recipe into its detector: where it is chosen, and where BatchNorm stays fixed."""

from typing import Any

from torch import nn

from crossbn.integrations.engine import Callback
from crossbn.integrations.lightning import CrossIterationNorm
from crossbn.lab.recipes.classification.norms import as_torch_has_them, options_blamed, scheduled_options
from crossbn.lab.recipes.classification.order import Plan
from crossbn.lab.recipes.classification.recipe import CROSS_ITERATION
from crossbn.lab.recipes.detection.backbones import EARLY
from crossbn.lab.recipes.detection.networks import is_pretrained
from crossbn.lab.recipes.detection.recipe import HEADS, NO_NORM, Recipe
from crossbn.swap import swap_norm_

_BODY = "backbone.body."


def is_fixed(name: str, recipe: Recipe) -> bool:
    """Tell whether a norm of a detector, by its qualified name, stays BatchNorm that nothing moves.

    Example:
        >>> recipe = Recipe(where="all", backbone="efficientnet_lite0")
        >>> [is_fixed(f"backbone.body.{stage}.0", recipe) for stage in ("layer1", "layer2")]
        [True, False]
    """
    if not name.startswith(_BODY) or not is_pretrained(recipe):
        return False
    return recipe.where == HEADS or name.removeprefix(_BODY).split(".")[0] in EARLY


def give_norm_(network: nn.Module, recipe: Recipe, plan: Plan) -> Callback | None:
    """Fix the norms of a trained backbone, and turn the other batch norms of `network` into the recipe's norm.

    Returns:
        The callback that the norms need in training, if they need one.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    swap_norm_(network, "frozen_bn", filter_fn=lambda _, name: is_fixed(name, recipe))
    if recipe.norm == NO_NORM:
        return None
    options = _options(recipe.norm, recipe.norm_options, recipe, plan)
    with options_blamed(recipe.norm):
        if recipe.norm in CROSS_ITERATION:
            callback = CrossIterationNorm(
                burn_in_steps=round(recipe.burn_in_epochs * plan.steps_per_epoch),
                **({"order": 0} if recipe.norm == "naive_cbn" else {}),
                **options,
            )
            callback.convert_(network)
            return callback
        if recipe.norm != "bn" or options:
            swap_norm_(network, recipe.norm, **options)
    return None


def switch_norm_(network: nn.Module, recipe: Recipe, plan: Plan) -> None:
    """Turn the norms of a detector in training into the recipe's other norm; fixed ones and parameters stay.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    assert recipe.switch_norm is not None
    options = _options(recipe.switch_norm, recipe.switch_options, recipe, plan)
    with options_blamed(recipe.switch_norm):
        swap_norm_(network, recipe.switch_norm, **options)


def _options(norm: str, given: Any, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    window = {"window": recipe.effective_window} if norm in CROSS_ITERATION else {}
    return {**window, **scheduled_options(norm, plan.forwards), **as_torch_has_them(given)}
