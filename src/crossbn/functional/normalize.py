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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from crossbn.functional import library, native
from crossbn.functional.geometry import Geometry, unflatten_weight
from crossbn.functional.kernels import blend_gradient, channelwise, native_available, reduce_gradient
from crossbn.functional.taylor import spread


class Jacobian(NamedTuple):
    """How pooled statistics follow a weight, through R remembered steps.

    For channel j, dmean / dW is the sum over steps r of mean_coefficient[r, j] * rows[r, 0], and dvar / dW that over
    their rows m of var_coefficient[r, m, j] * rows[r, m], plus var_jacobian[j].
    """

    rows: Tensor
    """[R, M, groups, I]: of each step the mean patch, then others."""
    mean_coefficient: Tensor
    """[R, C] or [R, 1]."""
    var_coefficient: Tensor
    """[R, M, C]."""
    var_jacobian: Tensor | None = None
    """[C, I]."""

    def weight_gradient(self, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
        """Return dL/dW [C, I] from a = dL/dmean and v = dL/dvar [C]."""
        grad = spread(self._coefficient(grad_mean, grad_var), self.rows.flatten(0, 1))
        return grad if self.var_jacobian is None else grad.addcmul_(self.var_jacobian, grad_var.unsqueeze(1))

    def add_weight_gradient_(self, grad: Tensor, grad_mean: Tensor, grad_var: Tensor) -> None:
        """Add dL/dW to `grad`, dense, [C, ...] with I numbers a channel."""
        if library.fit(grad, self.rows, self.var_coefficient):
            native.add_gradient_(grad, *self, grad_mean, grad_var)
        else:
            self._add_weight_gradient_(grad.detach().flatten(1), grad_mean, grad_var)

    @torch.no_grad()
    def _add_weight_gradient_(self, grad: Tensor, grad_mean: Tensor, grad_var: Tensor) -> None:
        coefficient, rows = self._coefficient(grad_mean, grad_var), self.rows.flatten(0, 1)
        if rows.shape[1] == 1:
            grad.addmm_(coefficient.mT, rows.squeeze(1))
        else:
            grad.add_(spread(coefficient, rows))
        if self.var_jacobian is not None:
            grad.addcmul_(self.var_jacobian, grad_var.unsqueeze(1))

    def _coefficient(self, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
        coefficient = self.var_coefficient * grad_var
        coefficient[:, 0].addcmul_(self.mean_coefficient, grad_mean)
        return coefficient.flatten(0, 1)


class Followed(NamedTuple):
    """A weight that pooled statistics follow: the operator's own, its geometry, and how."""

    weight: Tensor | None
    """None if its gradient is made elsewhere, from what is told to `deliver`."""
    geometry: Geometry
    jacobian: Jacobian
    deliver: Callable[[Jacobian, Tensor, Tensor], None] | None = None
    """Receives the Jacobian, a and v in backward; with `normalize` only."""


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    group: dist.ProcessGroup | None = None,
    count: int | Tensor | None = None,
    followed: Followed | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Normalize `x` [N, C, ...] with pooled statistics of which its own batch has the weight `share`.

    `mean` and `var` [C] may carry a graph (see `follow_weight`): they receive a and v of the table above. The
    part of them that is `x`'s own is already in the gradient of `x`.

    Args:
        x: input.
        mean: pooled mean.
        var: pooled biased variance.
        share: [C] or [1].
        weight: gamma.
        bias: beta.
        eps: added to the variance, inside the root.
        group: processes whose batches form today's batch together; None for this one alone.
        count: their positions together; with `group` only.
        followed: a weight that mean and variance follow; the same as calling `follow_weight` before, and quicker.
        output: the result, where it is known already and lacks a graph only.
    """
    # native kernels mix a low-precision input with float32 parameters and statistics, but not those two.
    weight = torch.ones_like(mean) if weight is None else _as_type(weight, mean.dtype)
    bias = None if bias is None else _as_type(bias, mean.dtype)
    counted = None if group is None else torch.as_tensor(count, device=x.device)
    # In a tuple, which autograd does not look into: what it takes for an argument it returns as a view.
    rest = _Rest(share, eps, group, counted, output, followed)
    y: Tensor = _Normalize.apply(x, mean, var, weight, bias, None if followed is None else followed.weight, rest)
    return y


def _as_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else values.to(dtype)  # `to` takes its time to do nothing


class _Rest(NamedTuple):
    """What `normalize` is told and has no gradient."""

    share: Tensor
    eps: float
    group: dist.ProcessGroup | None
    positions: Tensor | None
    output: Tensor | None
    followed: Followed | None


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        _: Tensor | None,
        rest: _Rest,
    ) -> Tensor:
        followed = rest.followed
        jacobian = (None,) * 4 if followed is None else followed.jacobian
        ctx.save_for_backward(x, mean, var, weight, rest.share, rest.positions, *jacobian)
        ctx.eps, ctx.group = rest.eps, rest.group
        ctx.geometry, ctx.deliver = (None, None) if followed is None else (followed.geometry, followed.deliver)
        if rest.output is not None:
            return rest.output
        if x.numel() == x.shape[1]:
            # A lone position may be its own mean and its variance 0: centred first, it comes out as beta exactly.
            x, mean = (x - channelwise(mean, x)).to(x.dtype), torch.zeros_like(mean)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, rest.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight, share, count, *jacobian = ctx.saved_tensors
        grads = _gradients(grad, x, mean, var, share, weight, ctx.eps, count, ctx.group)
        grad_followed = None
        if ctx.deliver is not None:
            ctx.deliver(Jacobian(*jacobian), grads.mean, grads.var)
        elif ctx.needs_input_grad[5]:
            flat = Jacobian(*jacobian).weight_gradient(grads.mean, grads.var)
            grad_followed = unflatten_weight(flat, ctx.geometry)
        grad_beta = grads.beta if ctx.needs_input_grad[4] else None
        return grads.x, grads.mean, grads.var, grads.gamma, grad_beta, grad_followed, None


def _gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    weight: Tensor,
    eps: float,
    count: Tensor | None,
    group: dist.ProcessGroup | None,
) -> native.Blended:
    """Return the gradients of the table above."""
    if group is None and library.fit(x, grad, mean, var, share, weight):
        return native.blend(grad, x, mean, var, eps, share, weight)
    invstd = torch.rsqrt(var + eps)
    if group is None and not native_available(x):
        dx, grad_gamma, grad_beta = _backward(grad, x, mean, invstd, share, weight, eps)
        sum_grad, sum_normalized = grad_beta, grad_gamma
    else:
        dx, grad_gamma, grad_beta, sum_grad, sum_normalized = _backward_in_halves(
            grad, x, mean, invstd, share, weight, count, group
        )
    scale = (weight * invstd).neg_()
    return native.Blended(dx, grad_gamma, grad_beta, scale * sum_grad, (scale * invstd).mul_(sum_normalized).mul_(0.5))


def _backward(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, share: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Blend the native train-mode backward, weight `share`, with the eval-mode one."""
    own = weight * share
    dx, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, x, own, None, None, mean, invstd, True, eps, [True, True, True]
    )
    rest = (weight - own).mul_(invstd)
    return dx.addcmul_(grad, channelwise(rest, x)), grad_weight, grad_bias


def _backward_in_halves(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    share: Tensor,
    weight: Tensor,
    count: Tensor | None,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with the two sums in hand: added up over all processes, and each channel's scaled by its share."""
    sum_grad, sum_product = reduce_gradient(grad, x, mean, invstd, weight)
    grad_bias, grad_weight = sum_grad, sum_product * invstd
    if group is None or count is None:
        count = mean.new_full((), x.numel() // x.shape[1])
    else:
        sums = torch.stack([sum_grad, sum_product])
        dist.all_reduce(sums, group=group)
        sum_grad, sum_product = sums[0], sums[1]
    dx = blend_gradient(grad, x, mean, invstd, weight, sum_grad * share, sum_product * share, count)
    return dx, grad_weight, grad_bias, sum_grad, sum_product * invstd


def follow_weight(mean: Tensor, var: Tensor, followed: Followed) -> tuple[Tensor, Tensor]:
    """Return `mean` and `var` [C] unchanged, with a graph to the weight that their remembered part follows."""
    graph: tuple[Tensor, Tensor] = _FollowWeight.apply(mean, var, *followed[:2], *followed.jacobian)
    return graph


class _FollowWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, _: Tensor, geometry: Geometry, *jacobian: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*jacobian)
        ctx.geometry = geometry
        return mean.clone(), var.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight = Jacobian(*ctx.saved_tensors).weight_gradient(grad_mean, grad_var)
        return grad_mean, grad_var, unflatten_weight(grad_weight, ctx.geometry), *[None] * 5
