"""Object detection and instance segmentation; `train` does a run."""

from crossbn.lab.recipes.classification.machine import Machine
from crossbn.lab.recipes.classification.recipe import OtherRunError, Progress, RecipeError
from crossbn.lab.recipes.detection.recipe import Outcome, Point, Recipe
from crossbn.lab.recipes.detection.training import train

__all__ = ["Machine", "OtherRunError", "Outcome", "Point", "Progress", "Recipe", "RecipeError", "train"]
