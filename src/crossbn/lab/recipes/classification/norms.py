"""Putting the norm of a recipe into its network."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import nn

from crossbn.compat import ensure_torchvision
from crossbn.integrations.engine import Callback
from crossbn.lab.networks import Block
from crossbn.lab.recipes.classification.recipe import NORM_ACTIVATIONS, Recipe
from crossbn.lab.recipes.norms import put_norm_
from crossbn.lab.recipes.order import Plan
from crossbn.lab.recipes.recipe import RecipeError, options_blamed
from crossbn.nn import reparametrize_


def give_norm_(network: nn.Module, recipe: Recipe, plan: Plan) -> Callback | None:
    """Turn the batch norms of `network` into the recipe's norm, and reparametrize its weights.

    Returns:
        The callback that the norms need in training, if they need one.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    if recipe.reparametrize is not None:
        with options_blamed(recipe.reparametrize):
            reparametrize_(network, recipe.reparametrize)
    if recipe.norm not in NORM_ACTIVATIONS:
        return put_norm_(network, recipe, plan)
    with options_blamed(NORM_ACTIVATIONS[recipe.norm]):
        _give_norm_activations_(network, recipe, {**recipe.default_options(recipe.norm), **recipe.norm_options})
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
