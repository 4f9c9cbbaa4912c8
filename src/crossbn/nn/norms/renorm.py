"""Batch Renormalization.

Sergey Ioffe, "Batch Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized Models", NeurIPS 2017,
https://arxiv.org/abs/1702.03275, Algorithm 1.

| paper | here | shape |
|---|---|---|
| mu_B, sigma_B | `mean`, `std` of the batch; the variance is biased, eps is inside the root | [C] |
| mu, sigma | `running_mean`, `sqrt(running_var + eps)` | [C] |
| r, d | `scale`, `shift`; constants to the gradient | [C] |
| r_max, d_max | `RenormSchedule` | scalar |
| alpha | `momentum` | scalar |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn.functional import batch_moments
from crossbn.nn.norms.base import RankedBatchNorm
from crossbn.nn.norms.ramp import Ramp


@dataclass(frozen=True)
class RenormSchedule:
    """How far renormalization may go at a training step; the defaults are the paper's.

    Attributes:
        r_max: the batch's standard deviation is corrected by this factor at most, from 1 (BatchNorm) on.
        d_max: the batch's mean is corrected by this many running standard deviations at most, from 0 on.

    Example:
        >>> short = RenormSchedule().scaled(0.01)
        >>> [(short.r_max(step), short.d_max(step)) for step in (50, 250, 400)]
        [(1.0, 0.0), (2.142857142857143, 5.0), (3.0, 5.0)]
    """

    r_max: Ramp = field(default=Ramp(1.0, 3.0, 5_000, 40_000))
    d_max: Ramp = field(default=Ramp(0.0, 5.0, 5_000, 25_000))

    def scaled(self, factor: float) -> RenormSchedule:
        """Return the same schedule over `factor` times as many steps."""
        return RenormSchedule(self.r_max.scaled(factor), self.d_max.scaled(factor))


def renorm_correction(
    mean: Tensor, std: Tensor, running_mean: Tensor, running_std: Tensor, r_max: Tensor, d_max: Tensor
) -> tuple[Tensor, Tensor]:
    """Return r and d [C], by which the batch's normalized values become those of the running statistics.

    `r = clip(std / running_std, 1 / r_max, r_max)`, `d = clip((mean - running_mean) / running_std, -d_max, d_max)`.
    """
    scale = (std / running_std).clamp(1 / r_max, r_max)
    shift = ((mean - running_mean) / running_std).clamp(-d_max, d_max)
    return scale, shift


def renormalize(
    x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Tensor:
    """Return `gamma * (xhat * r + d) + beta`, xhat the batch-normalized `x` [N, C, ...]; r and d are constants.

    That is a batch norm with gamma * r and beta + gamma * d for its parameters.
    """
    if weight is not None:
        scale, shift = weight * scale, weight * shift
    return F.batch_norm(x, None, None, scale, shift if bias is None else bias + shift, True, 0.0, eps)


class BatchRenorm(RankedBatchNorm):
    """BatchNorm whose training outputs are corrected towards those of evaluation; evaluation is BatchNorm's.

    The standard deviation is averaged, as in the paper, not the variance; the buffer `running_var` holds its square
    less eps, so that BatchNorm's evaluation and checkpoints fit. The step of the schedule is `num_batches_tracked`.

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variance, inside the root.
        momentum: of the running statistics, 0.01 in the paper; None for a cumulative average.
        affine: whether there are gamma and beta.
        track_running_stats: must be True.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        dims: spatial dimensions; None for any.
        schedule: how far the correction may go.

    Raises:
        ValueError: without running statistics, which the method needs.

    Example:
        >>> norm = BatchRenorm(8, schedule=RenormSchedule().scaled(0.1))
        >>> norm(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
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
        schedule: RenormSchedule | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, dims=dims)
        if not track_running_stats:
            raise ValueError("BatchRenorm needs running statistics, got track_running_stats=False")
        self.schedule = RenormSchedule() if schedule is None else schedule

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        self._check_positions(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            mean, var = batch_moments(x)
            std, running_std = ((v.to(mean.dtype) + self.eps).sqrt() for v in (var, self.running_var))
            step = self.num_batches_tracked.to(mean.dtype)
            limits = self.schedule.r_max(step), self.schedule.d_max(step)
            scale, shift = renorm_correction(mean, std, self.running_mean.to(mean.dtype), running_std, *limits)
        y = renormalize(x, scale, shift, self.weight, self.bias, self.eps)
        self._move_running_std(mean, std, running_std)
        return y

    @torch.no_grad()
    def _move_running_std(self, mean: Tensor, std: Tensor, running_std: Tensor) -> None:
        assert self.running_var is not None
        moved = running_std + (std - running_std) * self._step_size(std.dtype)
        self.running_var.copy_((moved.square() - self.eps).clamp(min=0))
        self._move_running(mean, self.running_var)
