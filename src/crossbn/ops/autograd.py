"""Normalization as a step of autograd: a function of the input, gamma, beta, and the operators' weights and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn import ops
from crossbn.ops.double_backward import changes, differentiable_output
from crossbn.ops.weight_gradient_hook import WeightGradientHook
from crossbn.torch_internals import is_freed, is_wrapped


class Run(NamedTuple):
    """Channels `start` to `stop`, whose pooled statistics follow operators."""

    start: int
    stop: int
    geometries: tuple[C.Geometry, ...]
    dependence: C.Dependence
    hooks: tuple[WeightGradientHook | None, ...]
    """Where to add to each weight's gradient; None where it is handed to autograd."""


class Context(NamedTuple):
    """What a normalization is told beside the tensors that gradients go to."""

    share: Tensor
    """[C] or [1]: the weight of the input's own batch in the statistics."""
    eps: float
    label: str = "normalize"
    group: dist.ProcessGroup | None = None
    """The processes whose batches form today's batch together; None for this one alone."""
    positions: Tensor | None = None
    """Their positions together; with `group` only."""
    output: Tensor | None = None
    """The output, if it is known."""
    runs: tuple[Run, ...] = ()


def normalize(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    context: Context,
    operands: Sequence[Tensor | None] = (),
) -> Tensor:
    """Normalize `x` [N, C, ...] with pooled statistics.

    The gradients of `mean` and `var` [C] are a and v of the table in `functional/normalize.py`; the part of them that
    is of `x` itself is already in its gradient.

    Args:
        x: input.
        mean: pooled mean.
        var: pooled biased variance.
        gamma: scale; None for 1.
        beta: offset; None for 0.
        context: the rest.
        operands: weight and bias of each operator of each run, in turn; None for what gets no gradient.

    Raises:
        ValueError: if a vector does not have the size of the channels.
    """
    shape = x.shape[1:2]
    for vector in (mean, var, gamma, beta):
        if vector is not None and vector.shape != shape:
            raise ValueError(
                f"statistics, gamma and beta must have the shape {tuple(shape)}, got {tuple(vector.shape)}"
            )
    if context.share.shape != shape and context.share.shape != (1,):
        raise ValueError(f"share must have the shape {tuple(shape)} or (1,), got {tuple(context.share.shape)}")
    # Native kernels mix a low-precision input with float32 parameters and statistics, but not those two. With a
    # channels-last input they take every vector for a dense one.
    mean, var = mean.contiguous(), var.contiguous()
    gamma = torch.ones_like(mean) if gamma is None else _dense(gamma, mean.dtype)
    beta = None if beta is None else _dense(beta, mean.dtype)
    # `context` is a tuple, which autograd does not look into: what it takes for an argument it returns as a view.
    y: Tensor = _Normalize.apply(x, mean, var, gamma, beta, context, *operands)
    return y


def _dense(values: Tensor, dtype: torch.dtype) -> Tensor:
    # `to` takes its time to do nothing.
    return values.contiguous() if values.dtype == dtype else values.to(dtype, memory_format=torch.contiguous_format)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        context: Context,
        *operands: Tensor | None,
    ) -> Tensor:
        kept = [tensor for run in context.runs for tensor in run.dependence.tensors()]
        ctx.save_for_backward(x, mean, var, gamma, context.share, context.positions, *kept)
        ctx.runs = [
            (run.start, run.stop, run.geometries, run.hooks, run.dependence.is_curved, run.dependence.is_centred)
            for run in context.runs
        ]
        ctx.operands = operands  # not saved: their values are not needed, and may change
        ctx.eps, ctx.group, ctx.label = context.eps, context.group, context.label
        if context.output is not None:
            return context.output
        return C.normalized(x, mean, var, gamma, beta, context.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compiling = torch.compiler.is_compiling()
        if not compiling and is_wrapped(grad):
            raise RuntimeError("batched gradients (is_grads_batched=True, vmap) are not supported: take one at a time")
        x, mean, var, gamma, share, count, *kept = ctx.saved_tensors
        runs, tensors = [], iter(kept)
        for start, stop, geometries, hooks, *flags in ctx.runs:
            dependence = C.Dependence.of_tensors(tensors, len(geometries), *flags)
            runs.append(Run(start, stop, geometries, dependence, hooks))
        if torch.is_grad_enabled() and not compiling:
            return _differentiable(ctx, grad, (x, mean, var, gamma), share, runs)
        needed = ctx.needs_input_grad
        operators = [
            (run, *each)
            for run in runs
            for each in zip(run.geometries, run.dependence.jacobians, run.hooks, strict=True)
        ]
        wanted = [needed[6 + 2 * i] and hook is None for i, (_, _, _, hook) in enumerate(operators)]
        jacobians = [(run.start, jacobian) for (run, _, jacobian, _), own in zip(operators, wanted, strict=True) if own]
        found = ops.step_backward(grad, x, mean, var, share, gamma, ctx.eps, jacobians, count, ctx.group)
        grads: list[Tensor | None] = [found.x, found.mean, found.var, found.gamma, found.beta]
        grads = [each if own else None for each, own in zip(grads, needed[:5], strict=True)]
        grads.append(None)
        weights = iter(found.weights)
        for i, (run, geometry, jacobian, hook) in enumerate(operators):
            weight, bias = ctx.operands[2 * i : 2 * i + 2]
            grads.append(_shaped(next(weights), geometry, weight) if wanted[i] else None)
            a, v = found.mean[run.start : run.stop], found.var[run.start : run.stop]
            if hook is not None and needed[6 + 2 * i]:
                hook.deliver(jacobian, a, v)
            of_bias = run.dependence.bias_gradient(a, v).to(bias.dtype) if needed[7 + 2 * i] else None
            grads.append(of_bias)
        return tuple(grads)


def _shaped(rows: Tensor, geometry: C.Geometry, weight: Tensor) -> Tensor:
    """Return the gradient of a weight from rows [C, I], in its shape: a matrix may stand for a kernel of one tap."""
    own = C.unflatten_weight(rows, geometry) if geometry.transposed else rows
    own = own.reshape(weight.shape)
    return own if own.dtype == weight.dtype else own.to(weight.dtype)


def _differentiable(
    ctx: Any, grad: Tensor, arguments: tuple[Tensor, Tensor, Tensor, Tensor], share: Tensor, runs: Sequence[Run]
) -> tuple[Tensor | None, ...]:
    """Return the gradients with a graph: by autograd, of the step written out."""
    if ctx.group is not None:
        raise RuntimeError(f"no double backward through {ctx.label}: its statistics are joined over processes")
    if any(operand is not None and is_freed(operand) for operand in ctx.operands):
        raise RuntimeError(f"{ctx.label}: no double backward where its operator's weight is not kept")
    # Gradients are wanted with respect to the step's own arguments, of which some are made of others: through views,
    # which nothing else is made of.
    x, mean, var, gamma = (each.view_as(each) for each in arguments)
    operands = [None if each is None else each.view_as(each) for each in ctx.operands]
    shift, growth, i = torch.zeros_like(mean), torch.zeros_like(var), 0
    for start, stop, geometries, dependence, _ in runs:
        weights, biases = operands[i : i + 2 * len(geometries) : 2], operands[i + 1 : i + 2 * len(geometries) : 2]
        i += 2 * len(geometries)
        channels = torch.arange(start, stop, device=x.device)
        of_mean, of_var = changes(dependence, geometries, weights, biases)
        shift, growth = shift.index_add(0, channels, of_mean), growth.index_add(0, channels, of_var)
    y = differentiable_output(x, mean, var, gamma, share, ctx.eps, shift, growth)
    asked = [x, mean, var, gamma, *operands]
    wanted = [each for each in asked if each is not None and each.requires_grad]
    got = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), create_graph=True, allow_unused=True))
    found = [next(got) if each is not None and each.requires_grad else None for each in asked]
    of_beta = grad.to(y.dtype).sum([0, *range(2, x.ndim)])
    return *found[:4], of_beta if ctx.needs_input_grad[4] else None, None, *found[4:]
