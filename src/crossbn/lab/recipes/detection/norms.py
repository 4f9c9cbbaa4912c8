"""Putting the norm of a recipe into its detector: where it is chosen, and where BatchNorm stays fixed."""

from torch import nn

from crossbn.integrations.engine import Callback
from crossbn.lab.recipes.detection.backbones import EARLY
from crossbn.lab.recipes.detection.networks import is_pretrained
from crossbn.lab.recipes.detection.recipe import ALL, HEADS, NO_NORM, OWN_MODELS, Recipe
from crossbn.lab.recipes.norms import put_norm_
from crossbn.lab.recipes.order import Plan
from crossbn.lab.recipes.recipe import RecipeError
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
        RecipeError: if an option is not one of the norm's, or the detector has no norm to choose.
    """
    fixed = swap_norm_(network, "frozen_bn", filter_fn=lambda _, name: is_fixed(name, recipe))
    if recipe.norm == NO_NORM:
        return None
    if not fixed.left:
        raise RecipeError(
            f'{recipe.model} has norms in its backbone only, which where "{HEADS}" fixes: take where "{ALL}", or a '
            f"detector with norms in its heads, {' or '.join(OWN_MODELS)} for instance"
        )
    return put_norm_(network, recipe, plan)
