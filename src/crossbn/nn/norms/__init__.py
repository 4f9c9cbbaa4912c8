"""Every norm of the paper, by name (`registry.py`); one file for each that torch does not have, with its reference."""

from crossbn.nn.norms.batch_instance import BatchInstanceNorm
from crossbn.nn.norms.frozen import FrozenBatchNorm
from crossbn.nn.norms.kalman import KalmanNorm
from crossbn.nn.norms.native import InstanceNorm
from crossbn.nn.norms.ramp import Ramp
from crossbn.nn.norms.registry import NORMS, NormEntry, make_norm
from crossbn.nn.norms.renorm import BatchRenorm, RenormSchedule
from crossbn.nn.norms.sparse_switch import SparseSwitchNorm
from crossbn.nn.norms.sparsest_max import sparsest_max
from crossbn.nn.norms.switch import SwitchNorm
from crossbn.nn.norms.sync import SyncBatchNorm

__all__ = [
    "NORMS",
    "BatchInstanceNorm",
    "BatchRenorm",
    "FrozenBatchNorm",
    "InstanceNorm",
    "KalmanNorm",
    "NormEntry",
    "Ramp",
    "RenormSchedule",
    "SparseSwitchNorm",
    "SwitchNorm",
    "SyncBatchNorm",
    "make_norm",
    "sparsest_max",
]
