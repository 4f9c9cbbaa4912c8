"""What training with a norm looks like from inside: plain records out."""

from crossbn.analysis.fidelity_records import SAME_LAYER, WHOLE_NETWORK, Fidelity, FidelityRecord
from crossbn.analysis.probe import FidelityProbe
from crossbn.analysis.recommendation import Recommendation, recommend
from crossbn.analysis.training import fidelity

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
