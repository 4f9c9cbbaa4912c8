"""Image classification; `train` does a run."""

from crossbn.recipes.classification.machine import Machine
from crossbn.recipes.classification.recipe import OtherRunError, Outcome, Point, Progress, Recipe, RecipeError
from crossbn.recipes.classification.training import train

__all__ = ["Machine", "OtherRunError", "Outcome", "Point", "Progress", "Recipe", "RecipeError", "train"]
