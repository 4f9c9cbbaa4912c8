"""Norm layers."""

from crossbn.nn.cross_iteration import (
    CrossIterBatchNorm,
    CrossIterBatchNorm1d,
    CrossIterBatchNorm2d,
    CrossIterBatchNorm3d,
)
from crossbn.nn.norm_act import CrossIterBatchNormAct2d
from crossbn.nn.settings import Settings

__all__ = [
    "CrossIterBatchNorm",
    "CrossIterBatchNorm1d",
    "CrossIterBatchNorm2d",
    "CrossIterBatchNorm3d",
    "CrossIterBatchNormAct2d",
    "Settings",
]
