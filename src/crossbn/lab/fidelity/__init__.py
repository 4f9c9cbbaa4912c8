"""What training with a norm looks like from inside: plain records out.

What is imported here does not import torch; `crossbn.lab.fidelity.probe` measures.
"""

from crossbn.lab.fidelity.recommendation import Recommendation, recommend
from crossbn.lab.fidelity.records import (
    ALL,
    CAUSES,
    SAME_LAYER,
    TRUTHS,
    WHOLE_NETWORK,
    CauseRecord,
    Fidelity,
    FidelityRecord,
    read,
)

__all__ = [
    "ALL",
    "CAUSES",
    "SAME_LAYER",
    "TRUTHS",
    "WHOLE_NETWORK",
    "CauseRecord",
    "Fidelity",
    "FidelityRecord",
    "Recommendation",
    "read",
    "recommend",
]
