"""Switchable Normalization.

Ping Luo, Jiamin Ren, Zhanglin Peng, Ruimao Zhang, Jingyu Li, "Differentiable Learning-to-Normalize via Switchable
Normalization", ICLR 2019, https://arxiv.org/abs/1806.10779.

| paper | here | shape |
|---|---|---|
| mu_in, sigma_in^2 | moments over space (biased, as all here) | [N, C] |
| mu_ln, sigma_ln^2 | moments over channels and space | [N, 1] |
| mu_bn, sigma_bn^2 | moments over batch and space; running ones in evaluation | [1, C] |
| lambda, lambda' | `mean_logits`, `var_logits`; all 1 at the beginning | [3] |
| w, w' | their softmax: the importance of instance, layer and batch statistics | [3] |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn.functional import accumulation_dtype
from crossbn.nn.norms.base import RankedNorm, channelwise, unbiased


class Moments(NamedTuple):
    """Mean and biased variance, [N or 1, C or 1]."""

    mean: Tensor
    var: Tensor


def instance_moments(x: Tensor) -> Moments:
    """Return the moments [N, C] of `x` [N, C, ...] over space, in at least float32."""
    x = x.to(accumulation_dtype(x.dtype))
    if x.ndim == 2:
        return Moments(x, torch.zeros_like(x))
    var, mean = torch.var_mean(x, list(range(2, x.ndim)), correction=0)
    return Moments(mean, var)


def joint_moments(parts: Moments, dim: int) -> Moments:
    """Join the moments of parts of equal size along `dim`; nothing is subtracted from a second moment."""
    mean = parts.mean.mean(dim, keepdim=True)
    return Moments(mean, parts.var.mean(dim, keepdim=True) + (parts.mean - mean).square().mean(dim, keepdim=True))


def mix_moments(kinds: list[Moments], mean_ratios: Tensor, var_ratios: Tensor) -> Moments:
    """Return the moments [N, C] that are these parts, adding up to 1, of each kind."""
    mean = sum(ratio * kind.mean for ratio, kind in zip(mean_ratios, kinds, strict=True))
    var = sum(ratio * kind.var for ratio, kind in zip(var_ratios, kinds, strict=True))
    assert isinstance(mean, Tensor)
    assert isinstance(var, Tensor)
    return Moments(mean, var)


class SwitchNorm(RankedNorm):
    """A learnt mixture of the statistics of InstanceNorm, LayerNorm and BatchNorm, the same for all channels.

    Without space, input [N, C], an instance has no statistics: the mixture is of the other two, as in the authors'
    code. Evaluation uses running averages for BatchNorm's part; the paper prefers averages over a few batches.

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variance, inside the root.
        momentum: of the running statistics; None for a cumulative average.
        affine: whether there are gamma and beta.
        track_running_stats: whether there are running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        dims: spatial dimensions; None for any.

    Example:
        >>> norm = SwitchNorm(8)
        >>> norm.ratios(norm.mean_logits)
        tensor([0.3333, 0.3333, 0.3333], grad_fn=<SoftmaxBackward0>)
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
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, dims=dims)
        self.mean_logits = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
        self.var_logits = nn.Parameter(torch.ones(3, device=device, dtype=dtype))

    def ratios(self, logits: Tensor) -> Tensor:
        """Return the importance of each kind of statistics."""
        return logits.softmax(0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        self._check_input_dim(x)
        instance = instance_moments(x)
        kinds = [instance, joint_moments(instance, 1), self._batch_moments(instance)]
        present = slice(1 if x.ndim == 2 else 0, None)
        mean_ratios, var_ratios = (self.ratios(logits[present]) for logits in (self.mean_logits, self.var_logits))
        mean, var = mix_moments(kinds[present], mean_ratios, var_ratios)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = self.weight * scale
        y = (x - channelwise(mean, x)) * channelwise(scale, x)
        if self.bias is not None:
            y = y + channelwise(self.bias, x)
        self._count_batch(kinds[2], x.numel() // x.shape[1])
        return y.to(x.dtype)

    def _batch_moments(self, instance: Moments) -> Moments:
        if self.running_mean is None or self.running_var is None or self.training:
            return joint_moments(instance, 0)
        return Moments(
            *(running.to(instance.mean.dtype).unsqueeze(0) for running in (self.running_mean, self.running_var))
        )

    def _count_batch(self, batch: Moments, positions: int) -> None:
        self._move_running(batch.mean[0], unbiased(batch.var[0], positions))
