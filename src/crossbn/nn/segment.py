"""A run of channels of a norm: the operators that are summed into it, and what is remembered of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Settings
from crossbn.nn.history import History
from crossbn.nn.producer import ActivatedOperator, Operator, Producer
from crossbn.pairing.calls import Call

Calls = Sequence[Call | None]
"""One for each operator of a segment; None for a branch that is left out. Empty where nothing is known of the calls."""


class PastMoments(NamedTuple):
    """Moments of the remembered steps without bias, [R, C] each, the latest step first."""

    mean: Tensor
    var: Tensor
    compensated_mean: Tensor
    compensated_var: Tensor
    """Negative where the polynomial has left its range."""


class Segment:
    """A run of channels with its operators and its history.

    Without operators the moments are pooled as they are, or not at all. Norms that read the same output of the same
    operator (DenseNet) share its segment, which then computes once per step.

    Attributes:
        channels: how many.
        operators: those that are summed into it.
        settings: of the norm.
        direct: whether it is known to be the output of one operator, with nothing added.
        given: whether its operators were named by hand, and the graph is not asked.
        pooled: whether steps are pooled; else the channels have their own batch's statistics.
        readers: norms that it feeds.
        history: what is remembered.
        storage: how; None if nothing is compensated.
        activation: what is applied to its one operator's output before the norm reads it, if anything.
    """

    def __init__(
        self,
        channels: int,
        operators: Sequence[Operator],
        settings: Settings,
        like: Tensor,
        direct: bool = False,
        given: bool = False,
        pooled: bool = True,
    ) -> None:
        self.channels = channels
        self.operators = tuple(operators)
        self.activation = operators[0].activation if operators else None
        self.settings = settings
        self.direct, self.given, self.pooled = direct, given, pooled
        self.readers = 0
        self._has_bias: bool | None = None
        self._is_blind = False
        for producer in self.producers:
            producer.fed.append(self)
            producer.always |= given
        self.storage = self._make_storage()
        self.history = History(self.window - 1, self._shapes(), like, settings.history_dtype)

    @property
    def producers(self) -> list[Producer]:
        """The modules among its operators that pairing has named."""
        return [operator.producer for operator in self.operators if operator.producer is not None]

    @property
    def has_bias(self) -> bool:
        """Whether its operators had biases at the latest step."""
        return bool(self._has_bias)

    @property
    def window(self) -> int:
        """Steps to pool, today's included."""
        return self.settings.window if self.pooled else 1

    def forget(self) -> None:
        """Clear the history."""
        self.history.clear_()

    def _make_storage(self) -> C.Storage | None:
        first = self.operators[0] if self.operators else None
        if isinstance(first, ActivatedOperator) and self.settings.order > 0:
            return C.ActivatedStorage(first.geometry, first.has_bias, first.activation, self.settings)
        return C.make_storage([operator.geometry for operator in self.operators], self.settings)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return C.history_shapes(self.channels, self.storage, self.settings)

    def configure_(self, settings: Settings) -> None:
        """Fit the history to new settings; it is kept unless it lacks what they need, or means something else there."""
        other_order, self.settings = settings.order != self.settings.order, settings
        self.storage = self._make_storage()
        history, shapes = self.history, self._shapes()
        if shapes.keys() != history.rings.keys() or settings.history_dtype != history.narrow:
            self.history = history = History(self.window - 1, shapes, history["mean"], settings.history_dtype)
        elif history.slots != self.window - 1:
            history.resize_(self.window - 1)
        else:
            history.scratch = []  # positions may be others
        history.fit_(shapes)
        if other_order:
            self.forget()

    def align(self, calls: Sequence[Call]) -> Calls | None:
        """Return the calls in the order of the operators; None if they are of others.

        A sum may lack some of its terms: branches that a step leaves out.
        """
        if not self.operators:
            return () if not calls else None
        if len(self.operators) == 1 and len(calls) == 1 and self.operators[0].is_known(calls[0]):
            return calls
        left = list(calls)
        aligned: list[Call | None] = []
        for operator in self.operators:
            if operator.notice_surgery():
                self.forget()
            known = operator.parameter
            same = [call for call in left if call.parameter is not None and call.parameter is known]
            found = next(iter(same or [call for call in left if operator.fits(call)]), None)
            if found is not None:
                left.remove(found)
                if not operator.accept(found):
                    return None
            aligned.append(found)
        missing = aligned.count(None)
        return None if left or missing == len(aligned) or (missing and len(aligned) == 1) else aligned

    def held_calls(self, without_graph: bool = False) -> Calls:
        """Return the calls that hooks on the modules have held; empty if none has.

        Calls that the graph shows are not held, and not to be taken for something else that it shows: they are returned
        only where the norm's input is `without_graph`.
        """
        calls: list[Call | None] = []
        for operator in self.operators:
            if not torch.compiler.is_compiling() and operator.notice_surgery():
                self.forget()
            producer = operator.producer
            calls.append(None if producer is None else producer.latest_call(without_graph))
        return calls if any(call is not None for call in calls) else ()

    def finish_step(self) -> None:
        """Let go of what hooks have seen."""
        for operator in self.operators:
            if operator.producer is not None:
                operator.producer.finish_step()

    def release(self) -> None:
        """Stop feeding a norm; the last one lets go of the modules."""
        self.readers -= 1
        if not self.readers:
            for producer in self.producers:
                producer.release(self)

    def operands(self, x: Tensor, calls: Calls) -> tuple[list[C.Operand], Tensor | None]:
        """Return what the operators bring to a step, and the sum of their biases, which remembered means are without.

        Raises:
            WeightUnknown: if a weight is computed and no call tells it.
        """
        operands, biases = [], []
        for i, operator in enumerate(self.operators if self.storage is not None and self.window > 1 else ()):
            call = calls[i] if calls else None
            weight, bias = operator.weight(call), operator.bias(call)
            if weight is None:
                raise WeightUnknown
            if call is not None and (y := call.y) is not None:
                operands.append(C.Operand(call.geometry, weight, y, call.output_sizes))
            else:
                operands.append(C.Operand(operator.geometry, weight, None, x.shape[2:]))
            if bias is not None:
                biases.append(bias.detach().to(C.accumulation_dtype(x.dtype)))
        if not torch.compiler.is_compiling() and self._has_bias != bool(biases):
            if self._has_bias is not None:  # means with and without it do not go together
                self.forget()
            self._has_bias = bool(biases)
        bias = C.total(biases) if biases else None
        if self.activation is not None:  # before it a bias does not just shift the mean: it is one more weight
            return [operand._replace(bias=bias) for operand in operands], None
        return operands, bias

    def can_remember(self, calls: Calls) -> bool:
        """Tell whether the operators that are trained let their input be seen, and notice when they begin to."""
        if self.storage is None:
            return True
        if not self._is_blind and len(calls) == 1 and calls[0] is not None and calls[0].is_seen:
            return True
        present = [call for call in calls if call is not None]
        if any(call.is_trained and not call.is_seen for call in present):
            return False
        blind = not present or not all(call.is_seen for call in present)
        if self._is_blind and not blind:  # steps of a frozen weight, which do not tell how they follow it
            self.forget()
        self._is_blind = blind
        return True

    @torch.no_grad()
    def past(self) -> PastMoments:
        """Return the remembered moments as they were and at the present weights, the latest step first."""
        history = self.history
        kept, _ = history.past().recall(1.0, history["mean"].dtype)
        mean, var = kept["mean"], kept["var"]
        order = (int(history.num_steps) - 1 - torch.arange(len(mean))) % max(len(mean), 1)
        compensated = mean, var
        rows = [each.to(mean.dtype) for operator in self.operators if (each := operator.rows()) is not None]
        if self.storage is not None and len(rows) == len(self.operators):
            compensated = C.compensate(mean, var, self.storage.look_back(kept, rows).terms)
        return PastMoments(mean[order], var[order], compensated[0][order], compensated[1][order])


class WeightUnknown(Exception):  # noqa: N818  # not an error: the norm is plain for that step
    """The weight of an operator is computed from others, and cannot be seen."""
