"""BatchNorm that nothing moves any more.

The usual choice for detectors that start from a classifier: Kaiming He, Xiangyu Zhang, Shaoqing Ren, Jian Sun,
"Deep Residual Learning for Image Recognition", CVPR 2016, https://arxiv.org/abs/1512.03385, appendix A; here with the
semantics of `torchvision.ops.FrozenBatchNorm2d`, for any number of dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.nn.norms.base import RANKS, check_dims, check_input


class FrozenBatchNorm(nn.Module):
    """BatchNorm's evaluation, in training mode too: gamma, beta, mean and variance are buffers.

    Checkpoints of BatchNorm load, their `num_batches_tracked` is dropped; BatchNorm loads this norm's.

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variance, inside the root.
        momentum: of no effect; there to be constructed like BatchNorm.
        affine: whether there are gamma and beta.
        track_running_stats: must be True.
        device: of the buffers.
        dtype: of the buffers.
        dims: spatial dimensions; None for any.

    Raises:
        ValueError: without running statistics.

    Example:
        >>> norm = FrozenBatchNorm(8)
        >>> norm.load_state_dict(nn.BatchNorm2d(8).state_dict())
        <All keys matched successfully>
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dims: int | None = 2,
    ) -> None:
        super().__init__()
        check_dims(dims)
        if not track_running_stats:
            raise ValueError("FrozenBatchNorm needs statistics to be frozen, got track_running_stats=False")
        self.num_features, self.eps, self.momentum, self.affine, self.dims = num_features, eps, momentum, affine, dims
        self.label = type(self).__name__
        ones = torch.ones(num_features, device=device, dtype=dtype)
        self.register_buffer("weight", ones if affine else None)
        self.register_buffer("bias", torch.zeros_like(ones) if affine else None)
        self.register_buffer("running_mean", torch.zeros_like(ones))
        self.register_buffer("running_var", torch.ones_like(ones))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        check_input(self.label, x, self.num_features, RANKS.get(self.dims))
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return a line like BatchNorm's."""
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, dims={self.dims}"
