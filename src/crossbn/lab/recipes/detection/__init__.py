"""Object detection and instance segmentation; `train` does a run."""

from crossbn.lab.progress import Progress
from crossbn.lab.recipes.detection.recipe import Outcome, Point, Recipe
from crossbn.lab.recipes.machine import Machine
from crossbn.lab.recipes.recipe import OtherRunError, RecipeError
from crossbn.lab.recipes.training import train

__all__ = ["Machine", "OtherRunError", "Outcome", "Point", "Progress", "Recipe", "RecipeError", "train"]
