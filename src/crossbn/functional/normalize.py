"""Normalization with pooled statistics, and its gradients.

With g the gradient of the output, xhat the normalized input, `share` = 1/k, a = dL/dmean, v = dL/dvar:

| quantity | formula | equation |
|---|---|---|
| output | gamma * (x - mean) / sqrt(var + eps) + beta | (14) |
| dL/dx | gamma * invstd * (g - share * (E[g] + xhat * E[g * xhat])) | |
| a | -gamma * invstd * sum(g) | |
| v | -gamma * invstd^2 * sum(g * xhat) / 2 | |
| dL/dW | a * dmean/dW + v * dvar/dW, the remembered steps' part ("through") | |
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    group: dist.ProcessGroup | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Normalize `x` [N, C, ...] with pooled statistics of which its own batch has the weight `share`.

    `mean` and `var` [C] may carry a graph (see `follow_weight`): they receive a and v of the table above. The
    part of them that is `x`'s own is already in the gradient of `x`.

    Args:
        x: input.
        mean: pooled mean.
        var: pooled biased variance.
        share: [C].
        weight: gamma.
        bias: beta.
        eps: added to the variance, inside the root.
        group: processes whose batches form today's batch together; None for this one alone.
        count: their positions together, a scalar tensor; with `group` only.
    """
    # native kernels mix a low-precision input with float32 parameters and statistics, but not those two.
    weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    y: Tensor = _Normalize.apply(x, mean, var, share, weight, bias, eps, group, count)
    return y


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        share: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
        count: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, var, share, weight, count)
        ctx.eps, ctx.group = eps, group
        if x.numel() == x.shape[1]:
            # A lone position may be its own mean and its variance 0: centred first, it comes out as beta exactly.
            x, mean = (x - _channelwise(mean, x)).to(x.dtype), torch.zeros_like(mean)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, share, weight, count = ctx.saved_tensors
        invstd = torch.rsqrt(var + ctx.eps)
        if ctx.group is None:
            dx, grad_weight, grad_bias = _backward(grad, x, mean, invstd, share, weight, ctx.eps)
            sums = torch.stack([grad_bias, grad_weight])
        else:
            dx, grad_weight, grad_bias, sums = _sync_backward(
                grad, x, mean, var, share, weight, count, ctx.eps, ctx.group
            )
        grad_mean = -weight * invstd * sums[0]
        grad_var = -weight * invstd.square() * sums[1] / 2
        grad_beta = grad_bias if ctx.needs_input_grad[5] else None
        return dx, grad_mean, grad_var, None, grad_weight, grad_beta, None, None, None


def _backward(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, share: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Blend the native train-mode backward, weight `share`, with the eval-mode one."""
    dx, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight * share, None, None, mean, invstd, True, eps, [True, True, True]
    )
    return dx.addcmul_(grad, _channelwise(weight * invstd * (1 - share), x)), grad_weight, grad_bias


def _sync_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    weight: Tensor,
    count: Tensor,
    eps: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with the two expectations taken over the batches of all processes."""
    dx, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, var, None, None, False, eps, [True, True, True]
    )
    sums = torch.stack([grad_bias, grad_weight])
    dist.all_reduce(sums, group=group)
    invstd = torch.rsqrt(var + eps)
    scale = weight * invstd * share / count
    slope = scale * invstd * sums[1]
    dx = dx - _channelwise(scale * sums[0] - slope * mean, x) - _channelwise(slope, x) * x
    return dx.to(x.dtype), grad_weight, grad_bias, sums


def _channelwise(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (x.ndim - 2))


def follow_weight(
    mean: Tensor,
    var: Tensor,
    flat_weight: Tensor,
    mean_grad: Tensor,
    mean_coefficient: Tensor,
    var_coefficient: Tensor,
    var_jacobian: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return `mean` and `var` [C] unchanged, with a graph to the weights that their remembered part follows.

        dmean_j / dW_j = sum_s mean_coefficient[s, j] * mean_grad[s]
        dvar_j / dW_j = sum_s var_coefficient[s, j] * mean_grad[s] + var_jacobian[j]

    Args:
        mean: pooled mean.
        var: pooled variance.
        flat_weight: W, [C, I].
        mean_grad: [R, groups, I].
        mean_coefficient: [R, C].
        var_coefficient: [R, C].
        var_jacobian: [C, I].
    """
    followed: tuple[Tensor, Tensor] = _FollowWeight.apply(
        mean, var, flat_weight, mean_grad, mean_coefficient, var_coefficient, var_jacobian
    )
    return followed


class _FollowWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, flat_weight: Tensor, *terms: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*terms)
        ctx.dtype = flat_weight.dtype
        return mean.clone(), var.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        mean_grad, mean_coefficient, var_coefficient, var_jacobian = ctx.saved_tensors
        coefficient = mean_coefficient * grad_mean + var_coefficient * grad_var
        grouped = coefficient.mT.unflatten(0, (mean_grad.shape[1], -1))
        grad_weight = (grouped @ mean_grad.transpose(0, 1)).flatten(0, 1)
        grad_weight = torch.addcmul(grad_weight, var_jacobian, grad_var.unsqueeze(1))
        return grad_mean, grad_var, grad_weight.to(ctx.dtype), None, None, None, None
