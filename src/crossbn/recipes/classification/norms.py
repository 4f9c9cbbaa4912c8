"""Putting the norm of a recipe into its network."""

from typing import Any

from torch import nn

from crossbn.convert import convert_
from crossbn.nn import NORMS, RenormSchedule, reparametrize_
from crossbn.recipes.classification.networks import is_small
from crossbn.recipes.classification.recipe import Recipe, RecipeError
from crossbn.swap import swap_norm_

CROSS_ITERATION = ("cbn", "naive_cbn")
# Batch Renormalization's ramps end at 40,000 steps; a run of fewer than four times as many has them shortened.
_RENORM_STEPS = 160_000


def default_options(recipe: Recipe, norm: str, forwards: int) -> dict[str, Any]:
    """Return the options of a norm that follow the run, where the recipe does not give them.

    - "gn" has 32 groups, its paper's number, and `width / 2`, at most 32, in our small networks: 32 groups of one or
      two channels would be instance normalization.
    - "ssn" chooses at the end of the run, as in its paper.
    - "brn" has its paper's ramps, shortened in proportion in runs of fewer than 160,000 forwards.
    - "cbn" and "naive_cbn" have the recipe's window.

    Args:
        recipe: of the run.
        norm: one of `crossbn.nn.NORMS`.
        forwards: training forwards of a process.
    """
    if norm == "gn":
        return {"groups": max(1, min(32, recipe.width // 2)) if is_small(recipe.model) else 32}
    if norm == "ssn":
        return {"steps": forwards}
    if norm == "brn":
        return {"schedule": RenormSchedule().scaled(min(1.0, forwards / _RENORM_STEPS))}
    if norm in CROSS_ITERATION:
        return {"window": recipe.effective_window, **({"order": 0} if norm == "naive_cbn" else {})}
    return {}


def apply_norm_(network: nn.Module, recipe: Recipe, forwards: int, burn_in: int = 0) -> None:
    """Turn the batch norms of `network` into the recipe's norm, and reparametrize its weights.

    Raises:
        RecipeError: if an option is not one of the norm's.
    """
    options = {**default_options(recipe, recipe.norm, forwards), **recipe.norm_options}
    try:
        if recipe.reparametrize is not None:
            reparametrize_(network, recipe.reparametrize)
        if recipe.norm in CROSS_ITERATION:
            convert_(network, **{"burn_in": burn_in, **options})
        elif recipe.norm != "bn" or options:
            swap_norm_(network, recipe.norm, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{NORMS[recipe.norm].title}: {error}") from error
