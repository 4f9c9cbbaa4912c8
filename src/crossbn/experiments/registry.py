"""The experiments by name."""

from crossbn.experiments import (
    activations,
    architectures,
    backward,
    batch_size,
    bound,
    burn_in,
    compensation,
    cost,
    gradients,
    improvements,
    layers,
    norms,
    order,
    positions,
    sampling,
    weights,
    window,
)
from crossbn.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "norms": norms,
    "batch_size": batch_size,
    "architectures": architectures,
    "window": window,
    "compensation": compensation,
    "burn_in": burn_in,
    "order": order,
    "layers": layers,
    "cost": cost,
    "gradients": gradients,
    "backward": backward,
    "positions": positions,
    "bound": bound,
    "weights": weights,
    "activations": activations,
    "improvements": improvements,
    "sampling": sampling,
}
"""In the order of the paper, then what it does not have; a new table or figure is a module and an entry here."""
