"""What training with a norm looks like from inside: plain records out."""

from crossbn.lab.fidelity.fidelity_records import SAME_LAYER, WHOLE_NETWORK, Fidelity, FidelityRecord
from crossbn.lab.fidelity.probe import FidelityProbe
from crossbn.lab.fidelity.recommendation import Recommendation, recommend
from crossbn.lab.fidelity.training import fidelity

__all__ = [
    "SAME_LAYER",
    "WHOLE_NETWORK",
    "Fidelity",
    "FidelityProbe",
    "FidelityRecord",
    "Recommendation",
    "fidelity",
    "recommend",
]
