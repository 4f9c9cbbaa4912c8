"""The step written out, with a graph: for a backward that is itself differentiated.

The pooled statistics are polynomials M and V of the input, the weights and the biases (docs/derivation.md, section 7,
"Twice"); their values are known, so what is made here is 0 and has their derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn import ops
from crossbn.ops.types import Statistics
from crossbn.torch_internals import is_freed


def changes(
    of: C.Dependence,
    geometries: Sequence[C.Geometry],
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Return M - M_0 and V - V_0 + (M - M_0)^2 [C]: 0, with the graph of how they follow weights and biases."""
    _, weight, of_var, _ = of.jacobians[0]
    products, linear, added = (torch.zeros_like(each) for each in (of_var, of_var[0, 0], of_var[0, 0]))
    for geometry, own_weight, bias, jacobian in zip(geometries, weights, biases, of.jacobians, strict=True):
        if own_weight is not None:
            flat = C.flatten_weight(own_weight, geometry).to(of_var.dtype)
            change = flat - flat.detach()
            products = products + C.project(jacobian.rows.flatten(0, 1), change).reshape(of_var.shape)
            if jacobian.var_jacobian is not None:
                linear = linear + (jacobian.var_jacobian * change).sum(1)
        if bias is not None and of.of_bias is not None:
            by_bias = (bias - bias.detach()).to(of_var.dtype)
            added, linear = added + by_bias, linear + of.of_bias[1] * by_bias
    delta = products[:, 0] + added
    growth = linear + (of_var * products).sum((0, 1)) + (weight * delta.square()).sum(0)
    if not (of.is_curved and of.is_centred):
        growth = growth - (of.dvar_dvar * products[:, 0].square()).sum(0)
    if of.is_curved:
        growth = growth + (of.dvar_dvar.unsqueeze(1) * products[:, 1:].square()).sum((0, 1))
    return (weight * delta).sum(0), growth


def differentiable_output(
    x: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, share: Tensor, eps: float, shift: Tensor, growth: Tensor
) -> Tensor:
    """Return the output less beta, with the graph of how the statistics came about, for a second derivative.

    `shift` and `growth` [C] are 0, with the graph of what they follow beside `x`: `changes`.
    """
    wide, dims = x.to(mean.dtype), [0, *range(2, x.ndim)]
    today = wide.mean(dims)
    today_var = (wide - C.channelwise(today, x)).square().mean(dims)
    moved, offset = today - today.detach(), 2 * (today - mean).detach()
    growth = growth + share * (today_var - today_var.detach() + offset * moved + moved.square())
    shift = shift + share * moved
    invstd = torch.rsqrt(var + growth - shift.square() + eps)
    return (wide - C.channelwise(mean + shift, x)) * C.channelwise(gamma * invstd, x)


def gradients_with_graph(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    statistics: Statistics,
    runs: Sequence[tuple[int, int, tuple[C.Geometry, ...], Statistics]],
    operands: Sequence[Tensor | None],
    eps: float,
    label: str,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor | None]:
    """Return gradients of x, mean, var, gamma, beta and operands with a graph: by autograd, of the step written out."""
    ops.refuse_batches(grad)
    if group is not None:
        raise RuntimeError(f"no double backward through {label}: its statistics are joined over processes")
    if any(operand is not None and is_freed(operand) for operand in operands):
        raise RuntimeError(f"{label}: no double backward where its operator's weight is not kept")
    gamma = torch.ones_like(statistics.mean) if gamma is None else gamma
    # Gradients are wanted with respect to the step's own arguments, of which some are made of others: through views,
    # which nothing else is made of.
    x, mean, var, gamma = (each.view_as(each) for each in (x, statistics.mean, statistics.var, gamma))
    operands = [None if each is None else each.view_as(each) for each in operands]
    shift, growth, i = torch.zeros_like(mean), torch.zeros_like(var), 0
    for start, stop, geometries, each in runs:
        own = operands[i : i + 2 * len(geometries)]
        i += len(own)
        channels = torch.arange(start, stop, device=x.device)
        of_mean, of_var = changes(each.derivative, geometries, own[::2], own[1::2])
        shift, growth = shift.index_add(0, channels, of_mean), growth.index_add(0, channels, of_var)
    y = differentiable_output(x, mean, var, gamma, statistics.share, eps, shift, growth)
    asked = [x, mean, var, gamma, *operands]
    wanted = [each for each in asked if each is not None and each.requires_grad]
    got = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), create_graph=True, allow_unused=True))
    found = [next(got) if each is not None and each.requires_grad else None for each in asked]
    of_beta = grad.to(y.dtype).sum([0, *range(2, x.ndim)])
    return [*found[:4], of_beta, *found[4:]]
