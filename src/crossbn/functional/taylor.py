"""Moments of a remembered step at today's weights, by a Taylor polynomial in the weights.

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| | `mean_shift` | <mean_grad, W_t - W_s> | [R, C] | |
| | `var_slope` | <var_grad, W_t - W_s> | [R, C] | |
| | `curvature` | E[((W_t - W_s) * y_s)^2], order 2 only | [R, C] | |
| mu_{t-tau}(theta_t) | `past_mean` | mean + mean_shift | [R, C] | (8) |
| nu - mu^2 of the same | `past_var` | var + var_slope - mean_shift^2 (+ curvature) | [R, C] | (9) |

R remembered steps, C channels, I numbers per patch. The old weights never appear: `<grad, W_t - W_s>` is
`<grad, W_t>` less the number `<grad, W_s>` that was kept when the step was remembered.

Patches and their means are rows [M, groups, I], the same for all channels of a group; `project` applies a weight to
them and `spread` is its adjoint.

A mean may be a million times what it changes by, and rounding that much larger than the change. Weights that have not
changed must change nothing, so both products of a mean patch are summed in the same order: a matrix product has another
one for another number of rows, `project_means` and `project_var` have not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_CACHED_NUMBERS = 131_072  # half a megabyte of float32 per remembered step
_SMALL_WEIGHT = 2**15


def project(rows: Tensor, flat_weight: Tensor) -> Tensor:
    """Return <row, W_j> for each row and channel: [M, groups, I] and [C, I] give [M, C]."""
    groups = rows.shape[1]
    if groups == 1:
        return rows.squeeze(1) @ flat_weight.mT
    if groups == len(flat_weight):
        return (rows * flat_weight).sum(2)
    products = rows.transpose(0, 1) @ flat_weight.unflatten(0, (groups, -1)).mT
    return products.transpose(0, 1).flatten(1)


def spread(coefficient: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over m of coefficient_mj row_m for each channel j: [M, C] and [M, groups, I] give [C, I]."""
    groups = rows.shape[1]
    if groups == 1:
        return coefficient.mT @ rows.squeeze(1)
    if groups == coefficient.shape[1]:
        return (coefficient.unsqueeze(2) * rows).sum(0)
    return (coefficient.unflatten(1, (groups, -1)).permute(1, 2, 0) @ rows.transpose(0, 1)).flatten(0, 1)


def project_var(var_grad: Tensor, flat_weight: Tensor) -> Tensor:
    """Return <var_grad, W> for each remembered step: [R, C, I] and [C, I] give [R, C]."""
    if flat_weight.numel() <= _CACHED_NUMBERS:
        return (var_grad * flat_weight).sum(2)
    # A few channels at a time, so that the product stays in the cache; faster than bmm on the CPU.
    rows = max(1, _CACHED_NUMBERS // flat_weight.shape[1])
    parts = zip(var_grad.split(rows, 1), flat_weight.split(rows), strict=True)
    return torch.cat([(grad * weight).sum(2) for grad, weight in parts], 1)


def project_means(mean_grad: Tensor, flat_weight: Tensor) -> Tensor:
    """Return <mean_grad, W_j> for each remembered step and channel: [R, groups, I] and [C, I] give [R, C]."""
    steps, groups, size = mean_grad.shape
    channels = len(flat_weight)
    alike = mean_grad.unsqueeze(2).expand(steps, groups, channels // groups, size)
    return project_var(alike.reshape(steps, channels, size), flat_weight)


def project_steps(rows: Tensor, flat_weight: Tensor) -> Tensor:
    """Return <row, W_j> for M rows of each step, the first its mean patch: [R, M, groups, I] and [C, I] give [R, M, C].

    A large weight, for which it would cost more than all other rows, has no `project_means`: the matrix product of a
    handful of rows is trusted to sum as that of more.
    """
    products = project(rows.flatten(0, 1), flat_weight).reshape(*rows.shape[:2], len(flat_weight))
    if flat_weight.numel() <= _SMALL_WEIGHT:
        products[:, 0] = project_means(rows[:, 0], flat_weight)
    return products


class TaylorTerms(NamedTuple):
    """What the change of the weights since has done to each remembered step, [R, C] each."""

    mean_shift: Tensor
    var_slope: Tensor
    curvature: Tensor | None = None


def compensate(mean: Tensor, var: Tensor, terms: TaylorTerms) -> tuple[Tensor, Tensor]:
    """Return the remembered means and variances [R, C] at today's weights.

    The variance may come out negative: that is where the polynomial has left its range of validity, and
    what `pool` guards against.
    """
    shift, slope, curvature = terms
    past_var = torch.addcmul(var + slope, shift, shift, value=-1)
    return mean + shift, past_var if curvature is None else past_var + curvature
