"""Adding to the gradients of an operator's weight and bias where they are made, instead of beside them.

The gradient through the compensation has the weight's size. Handed to autograd as a second gradient, it would be
written, read again and added into a third tensor: in deep layers that costs more than computing it. A hook on the
operator's node of the graph adds it to the gradient that the node has just made. The hook lives and dies with the
graph; what it adds arrives from the backward of the norms that read the operator, which always comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbn.functional import Geometry, Jacobian, unflatten_weight
from crossbn.torch_internals import backward_id

_KEY = "crossbn"


class Delivery(NamedTuple):
    """What a norm's backward sends: gradients of pooled mean and variance, and how these follow weight and bias."""

    geometry: Geometry
    jacobian: Jacobian
    bias_jacobian: tuple[Tensor, Tensor] | None
    grad_mean: Tensor
    grad_var: Tensor

    def joined_with(self, other: Delivery) -> Delivery:
        """Return both as one; they are of the same statistics."""
        return self._replace(grad_mean=self.grad_mean + other.grad_mean, grad_var=self.grad_var + other.grad_var)


class Graft:
    """What is to be added to the gradients of one call's weight and bias when its node has run.

    Attributes:
        shared: statistics of this call by source, for the next norm that reads it. They go when the node has run.
    """

    def __init__(self, weight_slot: int, bias_slot: int, channels_last: bool) -> None:
        self.shared: dict[Any, Any] = {}
        self._weight_slot, self._bias_slot, self._channels_last = weight_slot, bias_slot, channels_last
        self._deliveries: list[Delivery] = []
        self._gradients: list[tuple[Tensor | None, Tensor | None]] = []
        self._task = -1

    @classmethod
    def on(cls, node: Any, weight_slot: int, bias_slot: int, channels_last: bool) -> Graft:
        """Return the graft on a node of the graph; it must not hold on to the node, which holds on to it."""
        found: Graft | None = node.metadata.get(_KEY)
        if found is None:
            found = node.metadata[_KEY] = cls(weight_slot, bias_slot, channels_last)
            if node.next_functions[weight_slot][0] is not None:
                node.register_hook(found._add)
        return found

    def deliver(self, delivery: Delivery) -> None:
        """Say what to add, in the norm's backward."""
        self._start()
        for i, other in enumerate(self._deliveries):
            if other.jacobian.rows.data_ptr() == delivery.jacobian.rows.data_ptr():
                self._deliveries[i] = other.joined_with(delivery)
                return
        self._deliveries.append(delivery)

    def deliver_gradients(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Say what to add where the gradients themselves are known, with their graph, if they have one."""
        self._start()
        self._gradients.append((weight, bias))

    def _start(self) -> None:
        if self._task != backward_id():  # what is left is of a backward that did not come to this node
            self._deliveries.clear()
            self._gradients.clear()
            self._task = backward_id()

    def _add(self, grad_inputs: tuple[Tensor | None, ...], _: tuple[Tensor, ...]) -> tuple[Tensor | None, ...] | None:
        self.shared.clear()
        if self._task != backward_id():
            return None
        deliveries, self._deliveries = self._deliveries, []
        gradients, self._gradients = self._gradients, []
        grads = list(grad_inputs)
        for delivery in deliveries:
            self._add_delivery(grads, delivery)
        for weight, bias in gradients:
            for slot, grad in ((self._weight_slot, weight), (self._bias_slot, bias)):
                mine = grads[slot]
                if grad is not None and mine is not None and slot >= 0:
                    turned = grad.flatten(1).mT if self._channels_last and slot == self._weight_slot else grad
                    grads[slot] = mine + turned.to(mine.dtype)
        return tuple(grads)

    @torch.no_grad()
    def _add_delivery(self, grads: list[Tensor | None], delivery: Delivery) -> None:
        grad, (geometry, jacobian, bias_jacobian, grad_mean, grad_var) = grads[self._weight_slot], delivery
        if grad is not None:
            rows = grad.mT if self._channels_last else grad
            if rows.is_contiguous() and not geometry.transposed and grad.dtype == grad_var.dtype:
                jacobian.add_weight_gradient_(rows, grad_mean, grad_var)
            else:
                flat = jacobian.weight_gradient(grad_mean, grad_var)
                whole = flat.mT if self._channels_last else unflatten_weight(flat, geometry)
                grads[self._weight_slot] = grad + whole.to(grad.dtype)
        if bias_jacobian is None or self._bias_slot < 0:
            return
        of_bias = grads[self._bias_slot]
        if of_bias is not None:
            of_mean, of_var = bias_jacobian
            grads[self._bias_slot] = of_bias + (of_mean * grad_mean + of_var * grad_var).to(of_bias.dtype)
