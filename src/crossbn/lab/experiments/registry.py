"""The experiments by name."""

from crossbn.lab.experiments import (
    activations,
    architectures,
    backward,
    batch_size,
    bound,
    burn_in,
    compensation,
    cost,
    depth,
    finetune,
    gradients,
    improvements,
    layers,
    learning_rate,
    norms,
    order,
    positions,
    sampling,
    weights,
    window,
)
from crossbn.lab.experiments.coco import TABLES
from crossbn.lab.experiments.experiment import Experiment, Scale

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
    "depth": depth,
    "weights": weights,
    "activations": activations,
    "improvements": improvements,
    "sampling": sampling,
    "finetune": finetune,
    "learning_rate": learning_rate,
    **TABLES,
}
"""In the order of the paper, then what it does not have; a new table or figure is a module and an entry here."""
_SCALES = {
    "batch_size": (Scale.SMALL, Scale.MEDIUM, Scale.FULL),
    "learning_rate": (Scale.MEDIUM,),
    "finetune": (Scale.SMALL,),
}


def scales_of(name: str) -> tuple[Scale, ...]:
    """Return the scales that there are of an experiment."""
    return _SCALES.get(name, (Scale.SMALL, Scale.FULL))
