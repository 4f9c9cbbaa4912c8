"""How pooled statistics follow the weight of an operator, by way of the remembered steps.

With a = dL/dmean and v = dL/dvar of the pooled statistics, DESIGN's "through":

    dL/dW = a dmean/dW + v dvar/dW
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from crossbn.functional import library, native
from crossbn.functional.geometry import Geometry, unflatten_weight
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
        if library.fit(grad, *(part for part in (*self, grad_mean, grad_var) if part is not None)):
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


def follow_weight(
    mean: Tensor, var: Tensor, weight: Tensor, geometry: Geometry, jacobian: Jacobian
) -> tuple[Tensor, Tensor]:
    """Return `mean` and `var` [C] unchanged, with a graph to the weight that their remembered part follows.

    Eager code adds the weight's gradient where the operator makes it (see `nn.graft`), which is quicker; this is for
    where there is no such place, as under `torch.compile`.
    """
    graph: tuple[Tensor, Tensor] = _FollowWeight.apply(mean, var, weight, geometry, *jacobian)
    return graph


class _FollowWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, weight: Tensor, geometry: Geometry, *jacobian: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*jacobian)
        ctx.geometry, ctx.shape = geometry, weight.shape  # a matrix may stand for a kernel of one tap
        return mean.clone(), var.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight = Jacobian(*ctx.saved_tensors).weight_gradient(grad_mean, grad_var)
        return grad_mean, grad_var, unflatten_weight(grad_weight, ctx.geometry).reshape(ctx.shape), *[None] * 5
