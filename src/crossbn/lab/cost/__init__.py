"""Time, memory and FLOPs of a model with one norm and another, measured side by side."""

from crossbn.lab.cost.cases import Case, CaseError
from crossbn.lab.cost.flops import Flops, count_step
from crossbn.lab.cost.measuring import measure
from crossbn.lab.cost.memory import peak_above_start
from crossbn.lab.cost.models import find_model
from crossbn.lab.cost.records import CostRecord, append_records, find_baseline, read_records
from crossbn.lab.cost.timing import Precision, Timing, interleave

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
