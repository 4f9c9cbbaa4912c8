"""The gradients of `normalize`, made so that they can be differentiated again: by autograd, of the step written out.

Pooled mean M and variance V are functions of today's input x and of the weights W and biases b that remembered steps
are moved to. With w_s the remembered steps' weights, own_s = dV / d past_var_s, share today's weight, m(x) and v(x)
today's moments, delta_s the change of a remembered mean and by_s its part that is due to the weights:

    M = M_0 + sum_s w_s delta_s + share dm
    V = V_0 + J dW + sum_s w_s delta_s^2 - sum_s own_s by_s^2 + share (dv + 2 (m_0 - M_0) dm + dm^2) - (M - M_0)^2

A d is a change from the values of the step: 0, with a gradient. J is the Jacobian of the step. The second order adds
sum_s own_s (E[q_s^2] + by_s^2), q_s the change of the output at the samples. Both are exact as long as no variance
that was clipped at 0 becomes valid, or the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional.geometry import Geometry, flatten_weight
from crossbn.functional.jacobian import Jacobian
from crossbn.functional.kernels import channelwise
from crossbn.functional.taylor import project


class Operand(NamedTuple):
    """An operator whose weight and bias statistics follow; the weight with its graph."""

    geometry: Geometry
    weight: Tensor
    bias: Tensor | None
    jacobian: Jacobian


class Followed(NamedTuple):
    """A run of channels whose statistics follow the operators that are summed into it."""

    start: int
    stop: int
    operands: tuple[Operand, ...]
    own: Tensor
    """[R, C]: d var / d past_var."""
    bias_var_jacobian: Tensor | None
    """[C]: d var / d bias, if there are biases."""
    curved: bool
    """Whether the polynomial is of the second order."""
    centred: bool
    """Whether the mean patch has been taken off the samples."""


class Gradients(NamedTuple):
    """Gradients with a graph; None for what needs none."""

    x: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    gamma: Tensor | None
    beta: Tensor
    followed: list[list[tuple[Tensor | None, Tensor | None]]]
    """Of the weight and the bias of each operand of each run."""


def differentiable_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor,
    share: Tensor,
    eps: float,
    followed: Sequence[Followed],
) -> Gradients:
    """Return the gradients of what was normalized with `mean` and `var` [C], given that of the output."""
    # Gradients are wanted with respect to the step's own arguments, of which some are made of others: through views,
    # which nothing else is made of.
    x, mean, var, gamma = (each.view_as(each) for each in (x, mean, var, gamma))
    followed = [run._replace(operands=tuple(map(_viewed, run.operands))) for run in followed]
    wide, dims = x.to(mean.dtype), [0, *range(2, x.ndim)]
    pooled_mean, pooled_var = _pooled(wide, mean, var, share, followed)
    invstd = torch.rsqrt(pooled_var + eps)
    y = (wide - channelwise(pooled_mean, x)) * channelwise(gamma * invstd, x)
    arguments: list[Tensor | None] = [x, mean, var, gamma]
    for run in followed:
        for operand in run.operands:
            arguments += [operand.weight, operand.bias]
    asked = [each for each in arguments if each is not None and each.requires_grad]
    got = iter(torch.autograd.grad(y, asked, grad.to(y.dtype), create_graph=True, allow_unused=True))
    grads = [next(got) if each is not None and each.requires_grad else None for each in arguments]
    pairs = iter(zip(grads[4::2], grads[5::2], strict=True))
    of_runs = [[next(pairs) for _ in run.operands] for run in followed]
    return Gradients(grads[0], grads[1], grads[2], grads[3], grad.to(y.dtype).sum(dims), of_runs)


def _viewed(operand: Operand) -> Operand:
    bias = operand.bias
    return operand._replace(
        weight=operand.weight.view_as(operand.weight), bias=None if bias is None else bias.view_as(bias)
    )


def _pooled(x: Tensor, mean: Tensor, var: Tensor, share: Tensor, followed: Sequence[Followed]) -> tuple[Tensor, Tensor]:
    """Return M and V: the values `mean` and `var`, with the graph of how they came about."""
    dims = [0, *range(2, x.ndim)]
    today = x.mean(dims)
    today_var = (x - channelwise(today, x)).square().mean(dims)
    moved = today - today.detach()
    offset = 2 * (today - mean).detach()
    shift, growth = share * moved, share * (today_var - today_var.detach() + offset * moved + moved.square())
    for run in followed:
        channels = torch.arange(run.start, run.stop, device=x.device)
        of_mean, of_var = _through(run, mean.dtype)
        shift, growth = shift.index_add(0, channels, of_mean), growth.index_add(0, channels, of_var)
    return mean + shift, var + growth - shift.square()


def _through(run: Followed, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return how a run's pooled statistics change by way of the remembered steps [C], short of the last term of V."""
    _, weight, of_var, _ = run.operands[0].jacobian
    products, linear, bias = torch.zeros_like(of_var), torch.zeros_like(of_var[0, 0]), None
    for geometry, own_weight, own_bias, jacobian in run.operands:
        flat = flatten_weight(own_weight, geometry).to(dtype)
        change = flat - flat.detach()
        products = products + project(jacobian.rows.flatten(0, 1), change).reshape(of_var.shape)
        if jacobian.var_jacobian is not None:
            linear = linear + (jacobian.var_jacobian * change).sum(1)
        if own_bias is not None:
            added = (own_bias - own_bias.detach()).to(dtype)
            bias = added if bias is None else bias + added
    by_weight = products[:, 0]
    delta = by_weight if bias is None else by_weight + bias
    growth = linear + (of_var * products).sum((0, 1)) + (weight * delta.square()).sum(0)
    if bias is not None and run.bias_var_jacobian is not None:
        growth = growth + run.bias_var_jacobian * bias
    if not (run.curved and run.centred):
        growth = growth - (run.own * by_weight.square()).sum(0)
    if run.curved:
        growth = growth + (run.own.unsqueeze(1) * products[:, 1:].square()).sum((0, 1))
    return (weight * delta).sum(0), growth
