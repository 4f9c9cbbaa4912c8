"""The experiments by name."""

from crossbn.experiments import cost, gradients
from crossbn.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {"cost": cost, "gradients": gradients}
"""In the order of the paper; a new table or figure is a module and an entry here."""
