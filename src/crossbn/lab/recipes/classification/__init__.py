"""Image classification; `train` does a run."""

from crossbn.lab.recipes.classification.machine import Machine
from crossbn.lab.recipes.classification.recipe import OtherRunError, Outcome, Point, Progress, Recipe, RecipeError
from crossbn.lab.recipes.classification.training import train

__all__ = ["Machine", "OtherRunError", "Outcome", "Point", "Progress", "Recipe", "RecipeError", "train"]
