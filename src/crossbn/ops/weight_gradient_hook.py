"""Adding to the gradient of a convolution's weight where the convolution makes it, instead of beside it.

The gradient through the compensation has the weight's size. Handed to autograd as a second gradient, it would be
written, read again and added to the first: with large weights that costs more than computing it. A hook on the
convolution's node of the graph adds it to the gradient that the node has just made. The hook lives and dies with the
graph; what it adds arrives from the backward of the norms that read the convolution, which always comes first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossbn import ops
from crossbn.ops.types import Statistics
from crossbn.torch_internals import backward_id

_KEY, _WEIGHT = "crossbn weight gradient", 1


class WeightGradientHook:
    """What is to be added to the weight's gradient of one call, not transposed, when its node has run."""

    def __init__(self) -> None:
        self._deliveries: dict[tuple[int, int], tuple[Statistics, Tensor, Tensor]] = {}
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
        if (known := self._deliveries.get(key)) is not None:
            grad_mean, grad_var = known[1] + grad_mean, known[2] + grad_var
        self._deliveries[key] = statistics, grad_mean, grad_var

    @torch.no_grad()
    def _add(self, grad_inputs: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
        deliveries, self._deliveries = self._deliveries, {}
        grad = grad_inputs[_WEIGHT]
        if self._task != backward_id() or grad is None:
            return None
        for (_, i), (statistics, grad_mean, grad_var) in deliveries.items():
            grad = ops.add_weight_gradient_(grad, statistics.derivative.jacobians[i], grad_mean, grad_var)
        return *grad_inputs[:_WEIGHT], grad, *grad_inputs[_WEIGHT + 1 :]
