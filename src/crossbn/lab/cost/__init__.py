"""Time, memory and FLOPs of a model with one norm and another, measured side by side.

What is imported here does not import torch; `crossbn.lab.cost.measuring` measures.
"""

from crossbn.lab.cost.cases import BASELINE, WINDOWED, Case, CaseError
from crossbn.lab.cost.records import CostRecord, Flops, find_baseline
from crossbn.lab.cost.timing import Precision, Timing

__all__ = ["BASELINE", "WINDOWED", "Case", "CaseError", "CostRecord", "Flops", "Precision", "Timing", "find_baseline"]
