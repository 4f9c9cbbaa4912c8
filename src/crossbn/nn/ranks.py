"""The cross-iteration norm for input of one rank, one for each of torch's BatchNorms."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn.nn.cross_iteration import CrossIterBatchNorm


class CrossIterBatchNorm1d(CrossIterBatchNorm):
    """`CrossIterBatchNorm` for input [N, C] or [N, C, L]."""

    rank = (2, 3)

    @classmethod
    def plain_type(cls) -> type[_BatchNorm]:
        """Return torch's norm."""
        return nn.BatchNorm1d


class CrossIterBatchNorm2d(CrossIterBatchNorm):
    """`CrossIterBatchNorm` for input [N, C, H, W]."""

    rank = (4,)

    @classmethod
    def plain_type(cls) -> type[_BatchNorm]:
        """Return torch's norm."""
        return nn.BatchNorm2d


class CrossIterBatchNorm3d(CrossIterBatchNorm):
    """`CrossIterBatchNorm` for input [N, C, D, H, W]."""

    rank = (5,)

    @classmethod
    def plain_type(cls) -> type[_BatchNorm]:
        """Return torch's norm."""
        return nn.BatchNorm3d
