"""Norm layers."""

from crossbn.functional import Settings
from crossbn.nn.layer import (
    CrossIterBatchNorm,
    CrossIterBatchNorm1d,
    CrossIterBatchNorm2d,
    CrossIterBatchNorm3d,
    CrossIterBatchNormAct2d,
)
from crossbn.nn.norms import (
    NORMS,
    BatchInstanceNorm,
    BatchRenorm,
    FrozenBatchNorm,
    InstanceNorm,
    KalmanNorm,
    NormEntry,
    Ramp,
    RenormSchedule,
    SparseSwitchNorm,
    SwitchNorm,
    SyncBatchNorm,
    make_norm,
)
from crossbn.nn.norms.reparametrize import REPARAMETRIZATIONS, WeightStandardization, reparametrize_

__all__ = [
    "NORMS",
    "REPARAMETRIZATIONS",
    "BatchInstanceNorm",
    "BatchRenorm",
    "CrossIterBatchNorm",
    "CrossIterBatchNorm1d",
    "CrossIterBatchNorm2d",
    "CrossIterBatchNorm3d",
    "CrossIterBatchNormAct2d",
    "FrozenBatchNorm",
    "InstanceNorm",
    "KalmanNorm",
    "NormEntry",
    "Ramp",
    "RenormSchedule",
    "Settings",
    "SparseSwitchNorm",
    "SwitchNorm",
    "SyncBatchNorm",
    "WeightStandardization",
    "make_norm",
    "reparametrize_",
]
