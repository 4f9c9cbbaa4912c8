"""How pooled statistics follow the weights and biases of the operators that feed them, by way of the remembered steps.

With a = dL/dmean and v = dL/dvar of the pooled statistics, "through" lets today's weights have

    dL/dW = a dmean/dW + v dvar/dW

Written out as functions of the weights, which a second derivative needs, with w_s the remembered steps' weights,
dvar_dvar_s = dV / d past_var_s, delta_s the change of a remembered mean and by_s its part that is due to the weights:

    M = M_0 + sum_s w_s delta_s
    V = V_0 + J dW + sum_s w_s delta_s^2 - sum_s dvar_dvar_s by_s^2 - (M - M_0)^2

J is the Jacobian. The second order adds sum_s dvar_dvar_s (E[q_s^2] + by_s^2), q_s the change of the output at the
samples. Both are exact as long as no variance that was clipped at 0 becomes valid, or the other way round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional.geometry import Geometry, flatten_weight
from crossbn.functional.taylor import project, spread


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
        coefficient = self.var_coefficient * grad_var
        coefficient[:, 0].addcmul_(self.mean_coefficient, grad_mean)
        grad = spread(coefficient.flatten(0, 1), self.rows.flatten(0, 1))
        return grad if self.var_jacobian is None else grad.addcmul_(self.var_jacobian, grad_var.unsqueeze(1))


class Dependence(NamedTuple):
    """How the pooled statistics of a segment follow its operators."""

    jacobians: tuple[Jacobian, ...]
    """One for each operator."""
    dvar_dvar: Tensor
    """[R, C]: d var / d past_var."""
    of_bias: tuple[Tensor, Tensor] | None
    """[C] each: d mean / d bias and d var / d bias, if there are biases."""
    is_curved: bool
    """Whether the polynomial is of the second order."""
    is_centred: bool
    """Whether the mean patch has been taken off the samples."""

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors, for autograd to keep."""
        tensors: list[Tensor | None] = [self.dvar_dvar, *(self.of_bias or (None, None))]
        for jacobian in self.jacobians:
            tensors += jacobian
        return tensors

    @classmethod
    def of_tensors(
        cls, tensors: Iterator[Tensor | None], operators: int, is_curved: bool, is_centred: bool
    ) -> Dependence:
        """Take what `tensors` returned off the front."""
        dvar_dvar, of_mean, of_var = next(tensors), next(tensors), next(tensors)
        assert dvar_dvar is not None
        jacobians = [Jacobian(*itertools.islice(tensors, 4)) for _ in range(operators)]  # type: ignore[arg-type]
        of_bias = None if of_mean is None or of_var is None else (of_mean, of_var)
        return cls(tuple(jacobians), dvar_dvar, of_bias, is_curved, is_centred)

    def bias_gradient(self, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
        """Return dL/db [C] from a and v."""
        assert self.of_bias is not None
        return torch.addcmul(self.of_bias[0] * grad_mean, self.of_bias[1], grad_var)

    def changes(
        self, geometries: Sequence[Geometry], weights: Sequence[Tensor | None], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return M - M_0 and V - V_0 + (M - M_0)^2 [C]: 0, with the graph of how they follow weights and biases."""
        _, weight, of_var, _ = self.jacobians[0]
        products, linear, added = torch.zeros_like(of_var), torch.zeros_like(of_var[0, 0]), None
        for geometry, own_weight, bias, jacobian in zip(geometries, weights, biases, self.jacobians, strict=True):
            if own_weight is not None:
                flat = flatten_weight(own_weight, geometry).to(of_var.dtype)
                change = flat - flat.detach()
                products = products + project(jacobian.rows.flatten(0, 1), change).reshape(of_var.shape)
                if jacobian.var_jacobian is not None:
                    linear = linear + (jacobian.var_jacobian * change).sum(1)
            if bias is not None and self.of_bias is not None:
                of_bias = (bias - bias.detach()).to(of_var.dtype)
                added = of_bias if added is None else added + of_bias
        by_weight = products[:, 0]
        delta = by_weight if added is None else by_weight + added
        growth = linear + (of_var * products).sum((0, 1)) + (weight * delta.square()).sum(0)
        if added is not None and self.of_bias is not None:
            growth = growth + self.of_bias[1] * added
        if not (self.is_curved and self.is_centred):
            growth = growth - (self.dvar_dvar * by_weight.square()).sum(0)
        if self.is_curved:
            growth = growth + (self.dvar_dvar.unsqueeze(1) * products[:, 1:].square()).sum((0, 1))
        return (weight * delta).sum(0), growth
