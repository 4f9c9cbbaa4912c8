"""The cross-iteration form of a norm that timm fuses with what follows it."""

from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn.nn.ranks import CrossIterBatchNorm2d


class CrossIterBatchNormAct2d(CrossIterBatchNorm2d):
    """A cross-iteration norm, then dropout and activation: what timm's `BatchNormAct2d` becomes."""

    drop: Any
    act: Any

    def forward(self, x: Tensor) -> Tensor:
        """Normalize and activate `x` [N, C, H, W]."""
        return self.act(self.drop(super().forward(x)))

    @classmethod
    def plain_type(cls) -> type[_BatchNorm]:
        """Return timm's norm."""
        from timm.layers.norm_act import BatchNormAct2d

        return BatchNormAct2d
