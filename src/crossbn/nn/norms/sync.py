"""BatchNorm over the batches of all processes.

Chao Peng, Tete Xiao, Zeming Li, Yuning Jiang, Xiangyu Zhang, Kai Jia, Gang Yu, Jian Sun, "MegDet: A Large Mini-Batch
Object Detector", CVPR 2018, https://arxiv.org/abs/1711.07240. torch's own refuses tensors on the CPU, and
`DistributedDataParallel` refuses torch's own in a model on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn.functional import accumulation_dtype, batch_moments, join_moments
from crossbn.nn.norms.base import RankedBatchNorm
from crossbn.ops.autograd import Context, normalize


def joint_batch_moments(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance [C] of the batches of all processes, and their positions, a scalar.

    One collective; batches may differ in size, and all but one may be empty. The result has no graph.
    """
    dtype = accumulation_dtype(x.dtype)
    moments = batch_moments(x.detach()) if x.numel() else [x.new_zeros(x.shape[1], dtype=dtype)] * 2
    count = torch.full((1,), x.numel() // x.shape[1], dtype=dtype, device=x.device)
    own = torch.cat([*moments, count])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    means, variances, counts = torch.stack(everyone).split([x.shape[1], x.shape[1], 1], dim=1)
    mean, var = join_moments(means, variances, counts[:, 0])
    return mean, var, counts.sum()


class SyncBatchNorm(RankedBatchNorm):
    """BatchNorm of the joint batch in forward and backward, on any device and backend; alone it is BatchNorm.

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variance, inside the root.
        momentum: of the running statistics; None for a cumulative average.
        affine: whether there are gamma and beta.
        track_running_stats: whether there are running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        dims: spatial dimensions; None for any.
        process_group: the processes; None for all.

    Example:
        >>> norm, x = SyncBatchNorm(8), torch.randn(2, 8, 4, 4)
        >>> torch.equal(norm(x), nn.BatchNorm2d(8)(x))
        True
    """

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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, dims=dims)
        self.process_group = process_group

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """The processes to join now; None if this one is alone."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        group = self.active_group
        if group is None:
            return super().forward(x)
        self._check_input_dim(x)
        mean, var, count = joint_batch_moments(x, group)
        context = Context(torch.ones_like(mean), self.eps, self.label, group, count)
        y = normalize(x, mean, var, self.weight, self.bias, context)
        self._move_running(mean, var * (count / (count - 1).clamp(min=1)))
        return y
