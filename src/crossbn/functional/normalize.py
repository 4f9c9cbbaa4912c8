"""Normalization with pooled statistics, and its gradients.

With g the gradient of the output, xhat the normalized input, `share` = 1/k, a = dL/dmean, v = dL/dvar:

| quantity | formula | equation |
|---|---|---|
| output | gamma * (x - mean) / sqrt(var + eps) + beta | (14) |
| dL/dx | gamma * invstd * (g - share * (E[g] + xhat * E[g * xhat])) | |
| a | -gamma * invstd * sum(g) | |
| v | -gamma * invstd^2 * sum(g * xhat) / 2 | |

BatchNorm's backward has two halves, so that something can be done to the sums in between:

    reduce:  sum_grad = sum(g), sum_product = sum(g * (x - mean)), over batch and space
    blend:   dx = gamma * invstd * (g - (sum_grad + (x - mean) * invstd^2 * sum_product) / count)

SyncBatchNorm has both as native kernels on the GPU; elsewhere they are written out. Multiplying the sums by today's
share is the "count trick" (passing k times the count) with a count per channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from crossbn.functional.dependence import Jacobian
from crossbn.functional.moments import channelwise


class Gradients(NamedTuple):
    """Gradients of what goes into the normalization."""

    x: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    """a of the table above."""
    var: Tensor
    """v of the table above."""
    weights: list[Tensor]
    """[C, I] each: of the operators whose Jacobians were given."""


def normalized(x: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
    """Return the output of the table above."""
    if x.numel() == x.shape[1]:
        # A lone position may be its own mean and its variance 0: centred first, it comes out as beta exactly.
        x, mean = (x - channelwise(mean, x)).to(x.dtype), torch.zeros_like(mean)
    return F.batch_norm(x, mean, var, gamma, beta, False, 0.0, eps)


def gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    gamma: Tensor,
    eps: float,
    jacobians: Sequence[tuple[int, Jacobian]] = (),
    count: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Gradients:
    """Return the gradients of the table above, and those of weights that the statistics follow.

    Args:
        grad: of the output.
        x: input.
        mean: pooled mean.
        var: pooled variance.
        share: today's weight in them.
        gamma: scale.
        eps: added to the variance.
        jacobians: of operators, each with the first of the channels that it feeds.
        count: with `group`, the positions of today's batch, which is of all its processes.
        group: processes; None for this one alone.
    """
    invstd = torch.rsqrt(var + eps)
    if group is None and not native_available(x):
        dx, grad_gamma, grad_beta = _blend_native(grad, x, mean, invstd, share, gamma, eps)
        sum_grad, sum_normalized = grad_beta, grad_gamma
    else:
        sum_grad, sum_product = reduce_gradient(grad, x, mean, invstd, gamma)
        grad_beta, grad_gamma = sum_grad, sum_product * invstd
        if group is None or count is None:
            count = mean.new_full((), x.numel() // x.shape[1])
        else:
            sums = torch.stack([sum_grad, sum_product])
            dist.all_reduce(sums, group=group)
            sum_grad, sum_product = sums[0], sums[1]
        dx = blend_gradient(grad, x, mean, invstd, gamma, sum_grad * share, sum_product * share, count)
        sum_normalized = sum_product * invstd
    scale = (gamma * invstd).neg_()
    a, v = scale * sum_grad, (scale * invstd).mul_(sum_normalized).mul_(0.5)
    weights = []
    for start, jacobian in jacobians:
        stop = start + jacobian.var_coefficient.shape[2]
        weights.append(jacobian.weight_gradient(a[start:stop], v[start:stop]))
    return Gradients(dx, grad_gamma, grad_beta, a, v, weights)


def _blend_native(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, share: Tensor, gamma: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Blend the native train-mode backward, weight `share`, with the eval-mode one."""
    own = gamma * share
    dx, grad_gamma, grad_beta = torch.ops.aten.native_batch_norm_backward(
        grad, x, own, None, None, mean, invstd, True, eps, [True, True, True]
    )
    rest = (gamma - own).mul_(invstd)
    return dx.addcmul_(grad, channelwise(rest, x)), grad_gamma, grad_beta


def native_available(x: Tensor) -> bool:
    """Tell whether torch has native kernels for the halves, for a tensor like `x`."""
    return x.is_cuda and not torch.compiler.is_compiling()


def reduce_gradient(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return `sum_grad` and `sum_product` [C], in the type of `mean`."""
    if native_available(x):
        sums = torch.batch_norm_backward_reduce(grad, x, mean, invstd, gamma, True, False, False)
        return sums[0], sums[1]
    dims = [0, *range(2, x.ndim)]
    grad = grad.to(mean.dtype)
    return grad.sum(dims), (grad * (x.to(mean.dtype) - channelwise(mean, x))).sum(dims)


def blend_gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gamma: Tensor,
    sum_grad: Tensor,
    sum_product: Tensor,
    count: Tensor,
) -> Tensor:
    """Return dx in the type of `x`, from sums over `count` positions, a scalar."""
    if native_available(x):
        counts = count.reshape(1).to(torch.int32)
        return torch.batch_norm_backward_elemt(grad, x, mean, invstd, gamma, sum_grad, sum_product, counts)
    scale = gamma * invstd
    slope = scale * invstd.square() * sum_product / count
    offset = slope * mean - scale * sum_grad / count
    scale, slope, offset = (channelwise(each, x) for each in (scale, slope, offset))
    return (grad.to(mean.dtype) * scale - x.to(mean.dtype) * slope + offset).to(x.dtype)


def differentiable_output(
    x: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, share: Tensor, eps: float, shift: Tensor, growth: Tensor
) -> Tensor:
    """Return the output less beta, with the graph of how the statistics came about, for a backward that is itself one.

    With m(x) and v(x) today's moments, of which a d is the change, 0 with a gradient:

        M = mean + shift + share dm
        V = var + growth + share (dv + 2 (m - mean) dm + dm^2) - (M - mean)^2

    Args:
        x: input.
        mean: pooled mean.
        var: pooled variance.
        gamma: scale.
        share: today's weight.
        eps: added to the variance.
        shift: [C]: 0, with the graph of what else the mean follows.
        growth: [C]: the same of the variance, see `Dependence.changes`.
    """
    wide, dims = x.to(mean.dtype), [0, *range(2, x.ndim)]
    today = wide.mean(dims)
    today_var = (wide - channelwise(today, x)).square().mean(dims)
    moved, offset = today - today.detach(), 2 * (today - mean).detach()
    growth = growth + share * (today_var - today_var.detach() + offset * moved + moved.square())
    shift = shift + share * moved
    invstd = torch.rsqrt(var + growth - shift.square() + eps)
    return (wide - channelwise(mean + shift, x)) * channelwise(gamma * invstd, x)
