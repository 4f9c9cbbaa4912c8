"""How the moments of remembered steps follow the weights: to today's (a Taylor polynomial), and back (its gradient).

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| | `mean_shift` | <mean_grad, W_t - W_s> | [R, C] | |
| | `var_slope` | <var_grad, W_t - W_s> | [R, C] | |
| | `curvature` | E[((W_t - W_s) * y_s)^2], order 2 only | [R, C] | |
| mu_{t-tau}(theta_t) | `past_mean` | mean + mean_shift | [R, C] | (8) |
| nu - mu^2 of the same | `past_var` | var + var_slope - mean_shift^2 (+ curvature) | [R, C] | (9) |
| | `Jacobian.weight_gradient` | a dmean/dW + v dvar/dW; a = dL/dmean, v = dL/dvar | [C, I] | |

R remembered steps, C channels, I numbers per patch. `<grad, W_t - W_s>` is `<grad, W_t>` less the number `<grad, W_s>`
that was kept with the step. Patches and gradients are rows [M, groups, I], the same for all channels of a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_SMALL_WEIGHT = 2**15


def project(rows: Tensor, flat_weight: Tensor) -> Tensor:
    """Return <row, W_j> for each row and channel: [M, groups, I] and [C, I] give [M, C]."""
    groups = rows.shape[1]
    if groups == len(flat_weight):
        return (rows * flat_weight).sum(2)
    if groups == 1:
        return rows.squeeze(1) @ flat_weight.mT
    products = rows.transpose(0, 1) @ flat_weight.unflatten(0, (groups, -1)).mT
    return products.transpose(0, 1).flatten(1)


def spread(coefficient: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over m of coefficient_mj row_m, the adjoint: [M, C] and [M, groups, I] give [C, I]."""
    groups = rows.shape[1]
    if groups == 1:
        return coefficient.mT @ rows.squeeze(1)
    if groups == coefficient.shape[1]:
        return (coefficient.unsqueeze(2) * rows).sum(0)
    return (coefficient.unflatten(1, (groups, -1)).permute(1, 2, 0) @ rows.transpose(0, 1)).flatten(0, 1)


def project_means(mean_grad: Tensor, flat_weight: Tensor) -> Tensor:
    """Return what `project` does, summed in the same order for any number of rows, as a matrix product is not.

    A mean may be a million times its change, which rounding must not hide: weights that are the same change nothing.
    """
    groups = mean_grad.shape[1]
    alike = mean_grad if groups == 1 else mean_grad.repeat_interleave(len(flat_weight) // groups, 1)
    return (alike * flat_weight).sum(2)


def project_steps(rows: Tensor, flat_weight: Tensor) -> Tensor:
    """Return <row, W_j> for M rows of each step, the first its mean patch: [R, M, groups, I] and [C, I] give [R, M, C].

    For a large weight `project_means` would cost more than all other rows; there a matrix product of a handful of rows
    is trusted to sum as that of more.
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

    A variance below 0 is where the polynomial has left its range of validity, and what `pool` guards against.
    """
    shift, slope, curvature = terms
    past_var = torch.addcmul(var + slope, shift, shift, value=-1)
    return mean + shift, past_var if curvature is None else past_var + curvature


class Jacobian(NamedTuple):
    """How pooled statistics follow a weight, through R remembered steps.

    For channel j, dmean / dW is the sum over steps r of mean_coefficient[r, j] * rows[r, 0], and dvar / dW that over
    their rows m of var_coefficient[r, m, j] * rows[r, m], plus var_jacobian[j].
    """

    rows: Tensor  # [R, M, groups, I]: of each step the mean patch, then others
    mean_coefficient: Tensor  # [R, C] or [R, 1]
    var_coefficient: Tensor  # [R, M, C]
    var_jacobian: Tensor | None = None  # [C, I]

    def weight_gradient(self, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
        """Return dL/dW [C, I] from a = dL/dmean and v = dL/dvar [C]."""
        coefficient = self.var_coefficient * grad_var
        coefficient[:, 0].addcmul_(self.mean_coefficient, grad_mean)
        grad = spread(coefficient.flatten(0, 1), self.rows.flatten(0, 1))
        return grad if self.var_jacobian is None else grad.addcmul_(self.var_jacobian, grad_var.unsqueeze(1))


class Dependence(NamedTuple):
    """How the pooled statistics of a segment follow its operators."""

    jacobians: tuple[Jacobian, ...]  # one for each operator
    dvar_dvar: Tensor  # [R, C]: d var / d past_var
    of_bias: tuple[Tensor, Tensor] | None  # [C] each: d mean / d bias and d var / d bias, if there are biases
    is_curved: bool  # whether the polynomial is of the second order
    is_centred: bool  # whether the mean patch has been taken off the samples

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors, for autograd to keep."""
        return [self.dvar_dvar, *(self.of_bias or (None, None)), *itertools.chain(*self.jacobians)]

    @classmethod
    def of_tensors(cls, tensors: Iterator[Tensor | None], operators: int, curved: bool, centred: bool) -> Dependence:
        """Take what `tensors` returned off the front."""
        dvar_dvar, of_mean, of_var = next(tensors), next(tensors), next(tensors)
        assert dvar_dvar is not None
        jacobians = []
        for _ in range(operators):  # torch 2.8 does not trace itertools.islice
            rows, mean_coefficient, var_coefficient, rest = (next(tensors) for _ in range(4))
            jacobians.append(Jacobian(rows, mean_coefficient, var_coefficient, rest))  # type: ignore[arg-type]  # as taken
        of_bias = None if of_mean is None or of_var is None else (of_mean, of_var)
        return cls(tuple(jacobians), dvar_dvar, of_bias, curved, centred)

    def bias_gradient(self, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
        """Return dL/db [C] from a and v."""
        assert self.of_bias is not None
        return torch.addcmul(self.of_bias[0] * grad_mean, self.of_bias[1], grad_var)
