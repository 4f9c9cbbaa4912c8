"""Time, memory and FLOPs of a model with one norm and another, measured side by side."""

from crossbn.cost.cases import Case, CaseError
from crossbn.cost.flops import Flops, count_step
from crossbn.cost.measuring import measure
from crossbn.cost.memory import peak_above_start
from crossbn.cost.models import find_model
from crossbn.cost.records import CostRecord, append_records, find_baseline, read_records
from crossbn.cost.timing import Precision, Timing, interleave

__all__ = [
    "Case",
    "CaseError",
    "CostRecord",
    "Flops",
    "Precision",
    "Timing",
    "append_records",
    "count_step",
    "find_baseline",
    "find_model",
    "interleave",
    "measure",
    "peak_above_start",
    "read_records",
]
