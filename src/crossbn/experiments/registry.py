"""The experiments by name."""

from crossbn.experiments import cost, gradients, layers
from crossbn.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {"cost": cost, "gradients": gradients, "layers": layers}
"""In the order of the paper; a new table or figure is a module and an entry here."""
