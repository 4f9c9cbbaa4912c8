"""The experiments by name."""

from crossbn.lab.experiments import coco, tables
from crossbn.lab.experiments.cost import Cost
from crossbn.lab.experiments.experiment import Experiment
from crossbn.lab.experiments.gradients import Gradients
from crossbn.lab.experiments.layers import Layers
from crossbn.lab.experiments.sampling import Sampling

EXPERIMENTS: dict[str, Experiment] = {
    **tables.TABLES,
    **coco.TABLES,
    **{"cost": Cost(), "layers": Layers(), "gradients": Gradients(), "sampling": Sampling()},
}
"""A new table is a specification in `tables` or `coco`; what differs in kind is a file and an entry here.

Lists and pages have this order."""
