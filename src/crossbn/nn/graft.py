"""Adding to the weight gradient of a convolution where it is made, instead of beside it.

The gradient through the compensation has the weight's size. Handed to autograd as a second gradient, it would be
written, read again and added into a third tensor: in deep layers that costs more than computing it. A hook on the
convolution's node of the graph adds it to the gradient that the node has just made. The hook lives and dies with the
graph; what it adds arrives from the norm's backward, which always comes first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossbn.functional import Geometry, Jacobian, unflatten_weight

_WEIGHT = 1  # place of the weight among the inputs of a convolution's node


class Graft:
    """What is to be added to a weight's gradient when its node has run."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._pending: tuple[int, Jacobian, Tensor, Tensor] | None = None

    @staticmethod
    def onto(node: Any, weight: Any, geometry: Geometry) -> Graft | None:
        """Hook into the node of a graph; None if it is not that of a plain convolution with `weight` as its leaf."""
        if node.name() != "ConvolutionBackward0" or geometry.transposed:
            return None
        leaf = node.next_functions[_WEIGHT][0]
        if weight is None or getattr(leaf, "variable", None) is not weight:
            return None
        graft = Graft(geometry)
        node.register_hook(graft._add)
        return graft

    def deliver(self, jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> None:
        """Say what to add, in the norm's backward."""
        self._pending = torch._C._current_graph_task_id(), jacobian, grad_mean, grad_var

    def _add(self, grad_inputs: tuple[Tensor | None, ...], _: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
        pending, self._pending = self._pending, None
        grad = grad_inputs[_WEIGHT]
        if pending is None or grad is None:
            return None
        task, jacobian, grad_mean, grad_var = pending
        if task != torch._C._current_graph_task_id():  # of a backward that did not come to this node
            return None
        if grad.is_contiguous() and grad.dtype == grad_var.dtype:
            jacobian.add_weight_gradient_(grad, grad_mean, grad_var)
            return None
        with torch.no_grad():
            addition = unflatten_weight(jacobian.weight_gradient(grad_mean, grad_var), self.geometry)
            return *grad_inputs[:_WEIGHT], grad + addition.to(grad.dtype), *grad_inputs[_WEIGHT + 1 :]
