"""The experiments by name."""

from crossbn.experiments import cost, gradients, layers, sampling
from crossbn.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {"cost": cost, "gradients": gradients, "layers": layers, "sampling": sampling}
"""In the order of the paper, then what it does not have; a new table or figure is a module and an entry here."""
