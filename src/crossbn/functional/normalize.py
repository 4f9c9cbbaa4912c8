"""Normalization with pooled statistics, and its gradients.

With g the gradient of the output, xhat the normalized input, `share` = 1/k, a = dL/dmean, v = dL/dvar:

| quantity | formula | equation |
|---|---|---|
| output | gamma * (x - mean) / sqrt(var + eps) + beta | (14) |
| dL/dx | gamma * invstd * (g - share * (E[g] + xhat * E[g * xhat])) | |
| a | -gamma * invstd * sum(g) | |
| v | -gamma * invstd^2 * sum(g * xhat) / 2 | |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from crossbn.functional.moments import channelwise, native_available
from crossbn.functional.taylor import Jacobian


class Gradients(NamedTuple):
    """Gradients of what goes into the normalization."""

    x: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor  # a of the table above
    var: Tensor  # v of the table above
    weights: list[Tensor]  # [C, I] each: of the operators whose Jacobians were given


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

    Each Jacobian comes with the first of the channels that its operator feeds. With a `group` of processes, today's
    batch is that of all of them, of `count` positions together.
    """
    invstd, own = torch.rsqrt(var + eps), gamma * share
    alone = group is None and not native_available(x)
    if alone:  # dx is that of today's share of gamma; the rest of gamma has that of evaluation
        dx, sum_product, sum_grad = torch.ops.aten.native_batch_norm_backward(
            grad, x, own, None, None, mean, invstd, True, eps, [True, True, True]
        )
        dx.addcmul_(grad, channelwise((gamma - own).mul_(invstd), x))
        of_gamma, of_beta = sum_product, sum_grad
    else:
        of_beta, product = gradient_sums(grad, x, mean, invstd, gamma)
        of_gamma, sum_grad = product * invstd, of_beta
        if group is None or count is None:
            count = mean.new_full((), x.numel() // x.shape[1])
        else:
            sum_grad, product = sums = torch.stack([of_beta, product])
            dist.all_reduce(sums, group=group)
        sum_product = product * invstd
        dx = input_gradient(grad, x, mean, invstd, gamma, sum_grad * (share / count), product * (share / count))
    scale = (gamma * invstd).neg_()
    a, v = scale * sum_grad, (scale * invstd).mul_(sum_product).mul_(0.5)
    weights = []
    for start, jacobian in jacobians:
        stop = start + jacobian.var_coefficient.shape[2]
        weights.append(jacobian.weight_gradient(a[start:stop], v[start:stop]))
    return Gradients(dx, of_gamma, of_beta, a, v, weights)


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sums of g and of g (x - mean) over batch and space, [C] each."""
    if native_available(x):
        found = torch.batch_norm_backward_reduce(grad, x, mean, invstd, gamma, True, False, False)
        return found[0], found[1]
    # Written out: the batch of a process may be empty, which other native kernels do not survive.
    dims, wide = [0, *range(2, x.ndim)], grad.to(mean.dtype)
    return wide.sum(dims), (wide * (x.to(mean.dtype) - channelwise(mean, x))).sum(dims)


def input_gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gamma: Tensor | None,
    own_grad: Tensor,
    own_product: Tensor,
) -> Tensor:
    """Return dx in the type of `x`, from share * E[g] and share * E[g (x - mean)]."""
    if native_available(x):  # which divides by a count
        one = _one(x.device)
        return torch.batch_norm_backward_elemt(grad, x, mean, invstd, gamma, own_grad, own_product, one)
    scale = invstd if gamma is None else gamma * invstd
    slope = scale * invstd.square() * own_product
    offset = slope * mean - scale * own_grad
    scale, slope, offset = (channelwise(each, x) for each in (scale, slope, offset))
    return (grad.to(mean.dtype) * scale - x.to(mean.dtype) * slope + offset).to(x.dtype)


@functools.lru_cache(16)
def _one(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is kept
        return torch.ones(1, dtype=torch.int32, device=device)
