"""The step written out, with a graph: for a backward that is itself differentiated.

The pooled statistics are polynomials M and V of the input, the weights and the biases (docs/derivation.md, section 7,
"Twice"); their values are known, so what is made here is 0 and has their derivatives.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F


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
