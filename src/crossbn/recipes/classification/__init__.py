"""Image classification; `train` does a run."""

from crossbn.recipes.classification.machine import Machine
from crossbn.recipes.classification.recipe import Outcome, Point, Progress, Recipe, RecipeError
from crossbn.recipes.classification.training import train

__all__ = ["Machine", "Outcome", "Point", "Progress", "Recipe", "RecipeError", "train"]
