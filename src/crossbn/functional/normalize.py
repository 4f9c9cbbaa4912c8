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

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from crossbn.functional import library, native
from crossbn.functional.double_backward import Followed, differentiable_gradients
from crossbn.functional.kernels import blend_gradient, channelwise, native_available, reduce_gradient
from crossbn.torch_internals import is_wrapped


class Link(Protocol):
    """A run of channels whose statistics follow weights, and where the weights' gradients go."""

    start: int
    stop: int

    def take_tensors(self) -> tuple[Tensor | None, ...]:
        """Return what is to be kept for backward, and let go of it."""

    def deliver(self, tensors: Sequence[Tensor | None], grad_mean: Tensor, grad_var: Tensor) -> None:
        """Take a and v of the run's channels."""

    def follow(self, tensors: Sequence[Tensor | None]) -> Followed:
        """Return weights and Jacobians, for a backward that is to be differentiated itself."""

    def deliver_gradients(self, gradients: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """Take the gradients of weights and biases, with their graph."""


class Context(NamedTuple):
    """What `normalize` is told beside the tensors that gradients go to."""

    share: Tensor
    eps: float
    group: dist.ProcessGroup | None = None
    positions: Tensor | None = None
    """Of today's batch, those of all processes of the group together; with `group` only."""
    output: Tensor | None = None
    links: tuple[Link, ...] = ()
    once: str | None = None
    """What keeps a backward from being differentiated, if anything, as the rest of a sentence."""


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

    Raises:
        ValueError: if a vector does not have the size of the channels.
    """
    for name, vector in {"mean": mean, "var": var, "weight": weight, "bias": bias, "share": share}.items():
        sizes = (x.shape[1:2], torch.Size([1])) if name == "share" else (x.shape[1:2],)
        if vector is not None and vector.shape not in sizes:
            raise ValueError(f"{name} must have the shape {tuple(sizes[0])}, got {tuple(vector.shape)}")
    counted = None if group is None else torch.as_tensor(count, device=x.device)
    once = None if group is None else "of statistics that are joined over processes"
    return normalize_step(x, mean, var, weight, bias, Context(share, eps, group, counted, once=once))


def normalize_step(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, context: Context
) -> Tensor:
    """Do what `normalize` does at a training step, where the output may be known and weights may be linked."""
    # native kernels mix a low-precision input with float32 parameters and statistics, but not those two. With a
    # channels-last input they take every vector for a dense one.
    mean, var = mean.contiguous(), var.contiguous()
    weight = torch.ones_like(mean) if weight is None else _dense(weight, mean.dtype)
    bias = None if bias is None else _dense(bias, mean.dtype)
    # `context` is a tuple, which autograd does not look into: what it takes for an argument it returns as a view.
    y: Tensor = _Normalize.apply(x, mean, var, weight, bias, context)
    return y


def _dense(values: Tensor, dtype: torch.dtype) -> Tensor:
    # `to` takes its time to do nothing.
    return values.contiguous() if values.dtype == dtype else values.to(dtype, memory_format=torch.contiguous_format)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor | None, context: Context
    ) -> Tensor:
        kept = [link.take_tensors() for link in context.links]
        tensors = [tensor for of_link in kept for tensor in of_link]
        ctx.save_for_backward(x, mean, var, weight, context.share, context.positions, *tensors)
        ctx.links = list(zip(context.links, map(len, kept), strict=True))
        ctx.eps, ctx.group, ctx.once = context.eps, context.group, context.once
        if context.output is not None:
            return context.output
        return normalized(x, mean, var, weight, bias, context.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling() and is_wrapped(grad):
            raise RuntimeError("batched gradients (is_grads_batched=True, vmap) are not supported: take one at a time")
        x, mean, var, weight, share, count, *kept = ctx.saved_tensors
        linked, start = [], 0
        for link, amount in ctx.links:
            linked.append((link, kept[start : start + amount]))
            start += amount
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if ctx.once is not None:
                raise RuntimeError(f"no double backward {ctx.once}")
            followed = [link.follow(tensors) for link, tensors in linked]
            again = differentiable_gradients(grad, x, mean, var, weight, share, ctx.eps, followed)
            for (link, _), of_link in zip(linked, again.followed, strict=True):
                link.deliver_gradients(of_link)
            found: tuple[Tensor | None, ...] = again[:5]
        else:
            once = gradients(grad, x, mean, var, share, weight, ctx.eps, count, ctx.group)
            for link, tensors in linked:
                part = slice(link.start, link.stop)
                link.deliver(tensors, once.mean[part], once.var[part])
            found = once.x, once.mean, once.var, once.gamma, once.beta
        return *(each if wanted else None for each, wanted in zip(found, needed, strict=False)), None


def normalized(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the output of the table above."""
    if x.numel() == x.shape[1]:
        # A lone position may be its own mean and its variance 0: centred first, it comes out as beta exactly.
        x, mean = (x - channelwise(mean, x)).to(x.dtype), torch.zeros_like(mean)
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def gradients(
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
