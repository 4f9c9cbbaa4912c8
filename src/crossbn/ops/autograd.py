"""Normalization as a step of autograd: a function of the input, gamma, beta, and the operators' weights and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn import ops
from crossbn.ops import compiled
from crossbn.ops.double_backward import gradients_with_graph
from crossbn.ops.types import Layout, PackedStatistics, Statistics
from crossbn.torch_internals import backward_id

_KEY, _WEIGHT = "crossbn weight gradient", 1


class WeightGradientHook:
    """Adds to the gradient of a convolution's weight where the convolution makes it, instead of beside it.

    The gradient through the compensation has the weight's size. Handed to autograd as a second gradient, it would be
    written, read again and added to the first: with large weights that costs more than computing it. This hook on the
    node of one call, not transposed, adds it to the gradient that the node has just made. It lives and dies with the
    graph; what it adds arrives from the backward of the norms that read the call, which always comes first.
    """

    def __init__(self) -> None:
        self._deliveries: dict[tuple[int, int], tuple[Statistics, list[Tensor]]] = {}
        self._task = -1

    @classmethod
    def on(cls, node: Any) -> WeightGradientHook:
        """Return the hook on a convolution's node; it must not hold on to the node, which holds on to it."""
        found: WeightGradientHook | None = node.metadata.get(_KEY)
        if found is None:
            found = node.metadata[_KEY] = cls()
            node.register_hook(found._add)
        return found

    def deliver(self, statistics: Statistics, i: int, grad_mean: Tensor, grad_var: Tensor) -> None:
        """Say in a norm's backward what to add: gradients of pooled statistics, of whose operators this is the `i`-th.

        Norms that share statistics are joined into one delivery.
        """
        if self._task != backward_id():  # what is left is of a backward that did not come to this node
            self._deliveries.clear()
            self._task = backward_id()
        key = statistics.place, i
        self._deliveries.setdefault(key, (statistics, []))[1].extend((grad_mean, grad_var))

    @torch.no_grad()
    def _add(self, grad_inputs: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
        deliveries, self._deliveries = self._deliveries, {}
        grad = grad_inputs[_WEIGHT]
        if self._task != backward_id() or grad is None:
            return None
        for (_, i), (statistics, pairs) in deliveries.items():
            grad_mean, grad_var = pairs if len(pairs) == 2 else torch.stack(pairs).unflatten(0, (-1, 2)).sum(0)
            grad = ops.add_weight_gradient_(grad, statistics.derivative.jacobians[i], grad_mean, grad_var)
        return *grad_inputs[:_WEIGHT], grad, *grad_inputs[_WEIGHT + 1 :]


class Run(NamedTuple):
    """Channels `start` to `stop`, whose pooled statistics follow operators."""

    start: int
    stop: int
    geometries: tuple[C.Geometry, ...]
    statistics: Statistics
    hooks: tuple[WeightGradientHook | None, ...]  # to add to weights' gradients; None where autograd is handed them


class Context(NamedTuple):
    """What a normalization is told beside the tensors that gradients go to."""

    share: Tensor  # [C] or [1]: the weight of the input's own batch in the statistics
    eps: float
    label: str = "normalize"
    group: dist.ProcessGroup | None = None  # whose batches form today's together; None for this process alone
    positions: Tensor | None = None  # their positions together; with `group` only
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
    """Normalize `x` [N, C, ...] with pooled mean and biased variance [C]; gamma is 1 and beta 0 if they are None.

    The gradients of `mean` and `var` are a and v of the table in `functional/normalize.py`; the part of them that is of
    `x` itself is already in its gradient. The `operands` are weight and bias of each operator of each run, in turn,
    None for what gets no gradient.

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
    gamma = torch.ones_like(mean) if gamma is None else gamma.to(mean.dtype).contiguous()
    beta = None if beta is None else beta.to(mean.dtype).contiguous()
    # `context` is a tuple, which autograd does not look into: what it takes for an argument it returns as a view.
    return _Normalize.apply(x, mean, var, gamma, beta, context, *operands)


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
        ctx.runs = []
        kept: list[Tensor | None] = []
        for start, stop, geometries, statistics, hooks in context.runs:
            if isinstance(statistics, PackedStatistics):
                kept.append(statistics.packed)
                ctx.runs.append((start, stop, geometries, hooks, statistics.layout))
                continue
            dependence = statistics.derivative
            kept += dependence.tensors()
            ctx.runs.append((start, stop, geometries, hooks, (dependence.is_curved, dependence.is_centred)))
        ctx.save_for_backward(x, mean, var, gamma, context.share, context.positions, *kept)
        ctx.operands = operands  # not saved: their values are not needed, and may change
        ctx.eps, ctx.group, ctx.label = context.eps, context.group, context.label
        return C.normalized(x, mean, var, gamma, beta, context.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, gamma, share, count, *kept = ctx.saved_tensors
        statistics, needed = Statistics(mean, var, share, None, positions=count), ctx.needs_input_grad
        runs, operators, tensors = [], [], iter(kept)
        for start, stop, geometries, hooks, how in ctx.runs:
            if isinstance(how, Layout):
                each: Statistics = PackedStatistics(next(tensors), how)
            else:
                each = Statistics(mean, var, share, C.Dependence.of_tensors(tensors, len(geometries), *how))
            runs.append((start, stop, geometries, each))
            operators += [(start, stop, each, i, *of) for i, of in enumerate(zip(geometries, hooks, strict=True))]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            given = grad, x, gamma, statistics, runs, ctx.operands
            dx, a, v, dgamma, dbeta, *rest = gradients_with_graph(*given, ctx.eps, ctx.label, ctx.group)
            return dx, a, v, dgamma, dbeta if needed[4] else None, None, *rest
        wanted = [needed[6 + 2 * i] and each[-1] is None for i, each in enumerate(operators)]
        jacobians = [(o[0], o[2].derivative.jacobians[o[3]]) for o, own in zip(operators, wanted, strict=True) if own]
        if torch.compiler.is_compiling() and ctx.group is None:
            found = compiled.step_backward(grad, x, gamma, ctx.eps, statistics, jacobians)
        else:
            found = ops.step_backward(grad, x, gamma, ctx.eps, statistics, jacobians, ctx.group)
        own_grads = found.x, found.mean, found.var, found.gamma, found.beta
        grads = [each if own else None for each, own in zip(own_grads, needed[:5], strict=True)]
        grads.append(None)
        weights = iter(found.weights)
        for i, (start, stop, each, number, geometry, hook) in enumerate(operators):
            weight, bias = ctx.operands[2 * i : 2 * i + 2]
            grads.append(_shaped(next(weights), geometry, weight) if wanted[i] else None)
            a, v = found.mean[start:stop], found.var[start:stop]
            if hook is not None and needed[6 + 2 * i]:
                hook.deliver(each, number, a, v)
            grads.append(each.derivative.bias_gradient(a, v).to(bias.dtype) if needed[7 + 2 * i] else None)
        return tuple(grads)


def attach(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    run: Run,
    eps: float,
    label: str,
    output: Tensor | None = None,
) -> Tensor:
    """Return the output of a normalization with its graph: `normalize` in the usual case, without its detours.

    That is one run with one operator, whose statistics are packed. `weight` is None if it gets no gradient; `output` if
    the step has not made it.
    """
    return _Norm.apply(x, gamma, beta, weight, (run, eps, label, output))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor | None, told: tuple[Any, ...]
    ) -> Tensor:
        (_, _, (ctx.geometry,), statistics, (ctx.hook,)), ctx.eps, ctx.label, output = told
        ctx.save_for_backward(x, gamma, statistics.packed)
        ctx.layout, ctx.weight = statistics.layout, weight  # not saved: its values are not needed, and may change
        if output is not None:
            return output
        scale = torch.ones_like(statistics.mean) if gamma is None else gamma
        return C.normalized(x, statistics.mean, statistics.var, scale, beta, ctx.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, packed = ctx.saved_tensors
        of_x, of_gamma, of_beta, of_weight, _ = ctx.needs_input_grad
        statistics, hook = PackedStatistics(packed, ctx.layout), ctx.hook
        if torch.is_grad_enabled():
            dependence = statistics.dependence if of_weight else None
            runs = [] if dependence is None else [(0, x.shape[1], (ctx.geometry,), statistics)]
            operands = [] if dependence is None else [ctx.weight, None]
            found = gradients_with_graph(grad, x, gamma, statistics, runs, operands, ctx.eps, ctx.label)
            return found[0], found[3], found[4] if of_beta else None, found[5] if of_weight else None, None
        through = of_weight and hook is None
        dx, dgamma, dbeta, a, v, weights = ops.step_backward(
            grad, x, gamma, ctx.eps, statistics, None if through else ()
        )
        if of_weight and hook is not None and statistics.has_dependence:
            hook.deliver(statistics, 0, a, v)
        own = _shaped(weights[0], ctx.geometry, ctx.weight) if through else None
        return dx if of_x else None, dgamma if of_gamma else None, dbeta if of_beta else None, own, None


def _shaped(rows: Tensor, geometry: C.Geometry, weight: Tensor) -> Tensor:
    """Return the gradient of a weight from rows [C, I], in its shape: a matrix may stand for a kernel of one tap."""
    if geometry.transposed:
        rows = C.unflatten_weight(rows, geometry)
    own = rows if rows.shape == weight.shape else rows.reshape(weight.shape)
    return own if own.dtype == weight.dtype else own.to(weight.dtype)
