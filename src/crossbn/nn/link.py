"""The way from the statistics of a run of channels back to the weights that they follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from crossbn.functional import Followed, Geometry, Jacobian, Operand
from crossbn.nn.graft import Delivery, Graft

Reader = Callable[[], tuple[Tensor | None, Tensor | None]]


class Linked(NamedTuple):
    """An operator that the statistics follow: its place in the graph, and how its weight and bias are read again."""

    geometry: Geometry
    graft: Graft
    read: Reader


class Link:
    """A run of channels whose pooled statistics follow the weights of the calls that are summed into it.

    It is kept by the norm's node of the graph. Tensors are not: autograd saves them, and hands them in again.
    """

    def __init__(
        self,
        label: str,
        channels: tuple[int, int],
        operators: Sequence[Linked],
        jacobians: Sequence[Jacobian],
        own: Tensor,
        bias_jacobian: tuple[Tensor, Tensor] | None,
        order: int,
        centred: bool,
    ) -> None:
        self.label = label
        self.start, self.stop = channels
        self.operators = tuple(operators)
        self.order, self.centred = order, centred
        self._tensors: tuple[Tensor | None, ...] = (
            own,
            *(bias_jacobian or (None, None)),
            *(tensor for jacobian in jacobians for tensor in jacobian),
        )

    def take_tensors(self) -> tuple[Tensor | None, ...]:
        """Return what is to be kept for backward, and let go of it."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def _jacobians(self, tensors: Sequence[Tensor | None]) -> list[Jacobian]:
        return [Jacobian(*tensors[i : i + 4]) for i in range(3, len(tensors), 4)]  # type: ignore[arg-type]  # as kept

    def deliver(self, tensors: Sequence[Tensor | None], grad_mean: Tensor, grad_var: Tensor) -> None:
        """Send a and v of the run's channels to the operators' nodes."""
        of_mean, of_var = tensors[1:3]
        of_bias = None if of_mean is None or of_var is None else (of_mean, of_var)
        for (geometry, graft, _), jacobian in zip(self.operators, self._jacobians(tensors), strict=True):
            graft.deliver(Delivery(geometry, jacobian, of_bias, grad_mean, grad_var))

    def follow(self, tensors: Sequence[Tensor | None]) -> Followed:
        """Return weights and Jacobians, for a backward that is to be differentiated itself."""
        operands = []
        for operator, jacobian in zip(self.operators, self._jacobians(tensors), strict=True):
            weight, bias = operator.read()
            if weight is None:
                raise RuntimeError(f"{self.label}: no double backward where its operator's weight is not kept")
            operands.append(Operand(operator.geometry, weight, None if tensors[1] is None else bias, jacobian))
        own = tensors[0]
        assert own is not None
        return Followed(self.start, self.stop, tuple(operands), own, tensors[2], self.order == 2, self.centred)

    def deliver_gradients(self, gradients: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """Send the gradients themselves, with their graph."""
        for operator, (weight, bias) in zip(self.operators, gradients, strict=True):
            operator.graft.deliver_gradients(weight, bias)
