"""What feeds a run of channels of a norm: its operators, and what is remembered of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn import functional as C  # the library's F
from crossbn.nn.call import Call, NodeCall
from crossbn.nn.deeper import Deeper
from crossbn.nn.form_choice import make_form
from crossbn.nn.forms import Form, Influence, Observation, Recollection, Shapes, total
from crossbn.nn.history import History, Row
from crossbn.nn.link import Link, Linked
from crossbn.nn.pending import Pending
from crossbn.nn.producer import Producer
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Statistics, Today, join
from crossbn.nn.term import Term

Calls = Sequence[Call | None]
"""One for each term of a source; None for a branch that is left out. Empty where nothing is known of the calls."""


class Past(NamedTuple):
    """Moments of the remembered steps without bias, [R, C] each, the latest step first."""

    mean: Tensor
    var: Tensor
    compensated_mean: Tensor
    compensated_var: Tensor
    """Negative where the polynomial has left its range."""


class Moments(NamedTuple):
    """Of a batch: what `Source.observe` is told of it."""

    mean: Tensor
    var: Tensor
    finite: bool | Tensor
    """Whether those of all the norm's channels are."""


class NotTheirs(Exception):  # noqa: N818  # not an error: the norm is plain for that step
    """The output of a step is not what its operators' weights make of their inputs."""


class Source:
    """The operators that are summed into a run of channels, and the history of its statistics.

    Without operators the moments are pooled as they are, or not at all. Norms that read the same output of the same
    operator (DenseNet) share its source, which then computes once per step.

    Attributes:
        window: steps to pool; 1 for channels that no operator feeds, which then have their own batch's statistics.
        given: whether its operators were named by hand, and the graph is not asked.
        label: of the norm that it was made for.
    """

    def __init__(
        self,
        channels: int,
        terms: tuple[Term, ...],
        settings: Settings,
        like: Tensor,
        direct: bool = False,
        given: bool = False,
        pooled: bool = True,
        label: str = "",
    ) -> None:
        self.channels = channels
        self.terms = terms
        self.direct = direct
        self.given = given
        self.pooled = pooled
        self.label = label
        self.settings = settings
        self.deeper: Deeper | None = None
        self.readers = 0
        self.workspaces: list[Any] = []
        """Those of `quick` that no step is using."""
        self.has_bias: bool | None = None
        self._blind = False
        for term in terms:
            if term.producer is not None:
                term.producer.fed.append(self)
        self.form: Form | None = make_form(terms, settings)
        self.history = History(self.window - 1, self._shapes(), like, settings.history_dtype)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "workspaces": []}  # full of addresses

    @property
    def producers(self) -> list[Producer]:
        """The modules among its operators that pairing has named."""
        return [term.producer for term in self.terms if term.producer is not None]

    @property
    def window(self) -> int:
        """Steps to pool, today's included."""
        return self.settings.window if self.pooled else 1

    def forget(self) -> None:
        """Clear the history."""
        with self.history.lock:
            self.history.clear_()

    def _shapes(self) -> Shapes:
        shapes: Shapes = {"mean": (self.channels,), "var": (self.channels,), "count": ()}
        if self.form is not None:
            shapes |= self.form.shapes(self.channels)
        return shapes if self.deeper is None else shapes | self.deeper.shapes(self.channels)

    def reach_(self, operator: nn.Module | None) -> None:
        """Compensate for the weight of `operator`, the one before the previous norm, too; None for no longer."""
        if self.deeper is not None:
            self.deeper.release()
        self.deeper = None if operator is None else Deeper(operator, self.forget)
        self.configure_(self.settings)

    def configure_(self, settings: Settings) -> None:
        """Fit the history to new settings; it is kept unless it lacks what they need, or means something else there."""
        other_order, self.settings = settings.order != self.settings.order, settings
        self.form = make_form(self.terms, settings)
        self.workspaces = []
        shapes = self._shapes()
        if shapes.keys() != self.history.rings.keys() or settings.history_dtype != self.history.narrow:
            self.history = History(self.window - 1, shapes, self.history["mean"], settings.history_dtype)
        elif self.history.slots != self.window - 1:
            self.history.resize_(self.window - 1)
        self.history.fit_(shapes)
        if other_order:
            self.forget()

    def align(self, calls: Sequence[Call]) -> Calls | None:
        """Return the calls in the order of the terms; None if they are of other operators.

        A sum may lack some of its terms: branches that a step leaves out.
        """
        if not self.terms:
            return () if not calls else None
        if len(self.terms) == 1 and len(calls) == 1 and self.terms[0].is_known(calls[0]):
            return calls
        left = list(calls)
        aligned: list[Call | None] = []
        for term in self.terms:
            self._notice_replacement(term)
            found = next((call for call in left if call.leaf is not None and call.leaf is term.leaf), None)
            if found is None:
                found = next((call for call in left if term.fits(call)), None)
            if found is not None:
                left.remove(found)
                _complete(found, term)
                if not term.fits(found):
                    return None
                term.note(found)
            aligned.append(found)
        missing = aligned.count(None)
        return None if left or missing == len(aligned) or (missing and len(aligned) == 1) else aligned

    def held_calls(self, without_graph: bool = False) -> Calls:
        """Return the calls that hooks on the modules have held; empty if none has.

        Calls that the graph shows are not held, and not to be taken for something else that it shows: they are returned
        only where the norm's input is `without_graph`.
        """
        calls: list[Call | None] = []
        for term in self.terms:
            if not torch.compiler.is_compiling():
                self._notice_replacement(term)
            producer = term.producer
            calls.append(None if producer is None else producer.recall() if without_graph else producer.call)
        return calls if any(call is not None for call in calls) else ()

    def _notice_replacement(self, term: Term) -> None:
        """Forget if there is another Parameter in the weight's place, or the module has another stride: surgery."""
        if (producer := term.producer) is None:
            return
        parameter, known = producer.parameter, term.leaf
        # A tensor that is none is there for a call only (torch.func.functional_call).
        if parameter is not known and isinstance(parameter, nn.Parameter | None):
            term.leaf = parameter
            if known is not None:
                self.forget()
        geometry = producer.geometry
        if geometry is not term.geometry and geometry != term.geometry and term.is_shaped_like(geometry):
            term.geometry = producer.geometry
            self.forget()

    def finish_step(self) -> None:
        """Let go of what hooks have seen."""
        for term in self.terms:
            if term.producer is not None:
                term.producer.finish_step()

    def release(self) -> None:
        """Stop feeding a norm; the last one lets go of the modules."""
        self.readers -= 1
        if not self.readers:
            if self.deeper is not None:
                self.deeper.release()
            for term in self.terms:
                if term.producer is not None:
                    term.producer.release(self)

    @torch.no_grad()
    def past(self) -> Past:
        """Return the remembered moments as they were and at the present weights, the latest step first."""
        rings, _ = self.history.recall()
        steps = len(rings["mean"])
        order = (int(self.history.pushed) - 1 - torch.arange(steps)) % max(steps, 1)
        mean, var = rings["mean"], rings["var"]
        shifted = mean, var
        weights = self._weights((), mean.dtype)
        if weights is not None and (past := self._recollect(rings, weights)) is not None:
            shifted = C.compensate(mean, var, *past.drift)
        return Past(mean[order], var[order], shifted[0][order], shifted[1][order])

    def _weights(self, calls: Calls, dtype: torch.dtype) -> list[Tensor] | None:
        """Return today's weights as rows; None if one is not known."""
        if self.form is None:
            return []
        weights = []
        for i, term in enumerate(self.terms):
            call = calls[i] if calls else None
            weight = term.weight() if call is None or call.weight is None else call.weight
            if weight is None:
                return None
            flat = C.flatten_weight(weight.detach(), term.geometry)
            weights.append(flat if flat.dtype == dtype else flat.to(dtype))
        return weights

    def _bias(self, calls: Calls, dtype: torch.dtype) -> Tensor | None:
        """Return the sum of today's biases, which remembered means are without."""
        biases = []
        for i, term in enumerate(self.terms if self.form is not None else ()):
            call = calls[i] if calls else None
            bias = term.bias() if call is None or call.bias is None else call.bias
            if bias is not None:
                biases.append(bias.detach().to(dtype))
        if not torch.compiler.is_compiling() and self.has_bias != bool(biases):
            if self.has_bias is not None:  # means with and without it do not go together
                self.forget()
            self.has_bias = bool(biases)
        return total(biases) if biases else None

    def knows_weights(self, calls: Calls) -> bool:
        """Tell whether remembered steps can be moved to today's weights."""
        if calls and all(call is not None and call.weight is not None for call in calls):
            return True
        return self._weights(calls, torch.float32) is not None

    def can_remember(self, calls: Calls) -> bool:
        """Tell whether the operators that are trained let their input be seen, and notice when they begin to."""
        if self.form is None:
            return True
        if not self._blind and len(calls) == 1 and calls[0] is not None and calls[0].is_seen:
            return True
        if torch.compiler.is_compiling():
            return bool(calls)
        present = [call for call in calls if call is not None]
        if any(call.is_trained and not call.is_seen for call in present):
            return False
        blind = not present or not all(call.is_seen for call in present)
        if self._blind and not blind:  # steps of a frozen weight, which do not tell how they follow it
            self.forget()
        self._blind = blind
        return True

    def observe(
        self, x: Tensor, calls: Calls, complete: bool, moments: Moments, active: bool | Tensor, remember: bool
    ) -> Statistics:
        """Return the statistics at this step.

        Args:
            x: the channels that this source feeds, [N, C, ...]; with their graph if it has to reach deeper.
            calls: of the operators.
            complete: whether the channels are nothing but the sum of the calls.
            moments: of the channels.
            active: where false the window is 1 and nothing is remembered.
            remember: whether this step is to enter the history.

        Raises:
            NotTheirs: if `x` is not what the operators make of their inputs.
        """
        with torch.no_grad(), _full_precision(x.device.type):
            return self._observe(x, calls, complete, moments, active, remember)

    def _observe(
        self, x: Tensor, calls: Calls, complete: bool, moments: Moments, active: bool | Tensor, remember: bool
    ) -> Statistics:
        settings, history, (mean, var, finite) = self.settings, self.history, moments
        history.move_(mean)
        if self.deeper is not None:
            self.deeper.forget_replaced()
        weights = self._weights(calls, mean.dtype) if self.window > 1 else []
        assert weights is not None
        bias = self._bias(calls, mean.dtype) if self.window > 1 else None
        rings, present = history.recall()
        if settings.decay != 1:
            present = history.aged_votes(settings.decay, rings["mean"], present)
        past = self._recollect(rings, weights)
        today = Today(mean, var, x.numel() // x.shape[1], finite, None if past is None else past.drift, None)
        if (group := settings.active_group) is not None:
            today = join(today, group)
        row: Row = {}
        accept = today.finite if active is True else today.finite & active
        if remember and self.window > 1:
            row, theirs, sound = self._row(Observation(x, today, bias, weights, calls), complete)
            if theirs is False and accept is not False:
                raise NotTheirs
            # A batch that is not finite gets plain BatchNorm, as does one that the operators have not made: nothing
            # remembered takes part, nor is it remembered.
            accept = accept & theirs
        if history.is_readable:
            accept, today = bool(accept), today._replace(finite=bool(today.finite))
            present = present if accept else mean.new_zeros(len(rings["mean"]))
        elif present is not None:
            present = present * accept
        statistics = self._pool(today, bias, rings, past, present)
        if row and accept is not False:
            # Pooled moments may overflow where today's do not: then the past has to go by for them to be finite again.
            statistics = statistics._replace(pending=Pending(history, history.completed(row), accept & sound))
        return statistics

    def _recollect(self, rings: dict[str, Tensor], weights: list[Tensor]) -> Recollection | None:
        """Return what the remembered steps tell at these weights; None if they are not compensated."""
        if self.form is None or not weights:
            return None
        past = self.form.recollect(rings, weights)
        return past if self.deeper is None else past._replace(drift=self.deeper.add_drift(rings, past.drift))

    def _row(self, seen: Observation, complete: bool) -> tuple[Row, bool | Tensor, bool | Tensor]:
        """Return what to remember of today, whether it is the operators', and whether their inputs are finite."""
        mean = seen.today.mean
        row: Row = {"mean": mean if seen.bias is None else mean - seen.bias, "var": seen.today.var}
        row["count"] = torch.as_tensor(seen.today.positions, device=mean.device)
        theirs: bool | Tensor = True
        sound: bool | Tensor = True
        if self.form is not None and seen.weights and seen.calls:
            row |= self.form.remember(seen, self.history)
            if complete and seen.today.local is None and all(c is not None and c.is_seen for c in seen.calls):
                theirs = self.form.is_theirs(seen, row, self.history)
            if self.deeper is not None:
                row |= (earlier := self.deeper.remember(seen.x, mean, self.label))
                sound = sound & C.all_finite(*earlier.values())
            # Inputs that a stride skips may be infinite without the moments knowing.
            for i, call in enumerate(seen.calls):
                grad = self.form.mean_grad_in(row, i)
                if call is not None and grad is not None and not call.geometry.reads_every_input:
                    finite = C.all_finite(grad)
                    sound = sound & finite
                    theirs = theirs | _negated(finite)  # which then cannot be told
        return row, theirs, sound

    def _pool(
        self,
        today: Today,
        bias: Tensor | None,
        rings: dict[str, Tensor],
        past: Recollection | None,
        present: Tensor | None,
    ) -> Statistics:
        past_mean, past_var = rings["mean"], rings["var"]
        if today.drift is not None:
            past_mean, past_var = C.compensate(past_mean, past_var, *today.drift)
        if bias is not None:
            past_mean = past_mean + bias
        pooled = C.pool(today.mean, today.var, past_mean, past_var, present, self.settings.invalid)
        jacobians: tuple[C.Jacobian, ...] = ()
        bias_jacobian = own = None
        earlier = None
        through = self.settings.backward == "through" and len(past_mean) > 0
        if through and self.form is not None and past is not None and today.drift is not None:
            towards = (pooled.weight * pooled.deviation).mul_(2)
            own = pooled.weight * pooled.valid
            influence = Influence(pooled.weight, own, towards)
            jacobians = self.form.jacobians(rings, past._replace(drift=today.drift), influence)
            if self.deeper is not None:
                earlier = self.deeper.jacobian(rings, today.drift, influence)
            if bias is not None:
                local = 1 if today.local is None else today.local
                bias_jacobian = pooled.weight.sum(0) * local, towards.sum(0) * local
        counted: float | Tensor
        if present is None and self.settings.invalid == "max":
            counted = float(rings["count"].sum()) + today.positions
        else:
            counted = ((pooled.weight > 0) * rings["count"].unsqueeze(1)).sum(0) + today.positions
        several = counted > 1
        bessel = counted / (counted - 1 * several)  # a lone position keeps its variance, 0
        finite = today.finite & C.all_finite(pooled.var)  # large but finite moments may add up to infinity
        return Statistics(
            pooled.mean,
            pooled.var,
            pooled.share,
            bessel,
            several,
            today.positions,
            finite,
            jacobians,
            own,
            bias_jacobian,
            None,
            earlier,
        )

    def link(self, start: int, calls: Calls, statistics: Statistics, label: str) -> Link | None:
        """Return the way back to the operators' nodes; None if there is none, or one of them has no node."""
        if not statistics.jacobians or statistics.own is None or self.form is None:
            return None
        operators, jacobians = [], []
        for term, call, jacobian in zip(self.terms, calls, statistics.jacobians, strict=False):
            if call is None or not call.is_trained:
                continue
            graft = call.graft()
            if graft is None:
                return None
            operators.append(Linked(term.geometry, graft, call.operand_reader()))
            jacobians.append(jacobian)
        if not operators:
            return None
        channels = start, start + self.channels
        bias, order = statistics.bias_jacobian, self.settings.order
        return Link(label, channels, operators, jacobians, statistics.own, bias, order, self.form.centres)

    def follow_biases(self, statistics: Statistics, calls: Calls) -> tuple[Tensor, Tensor]:
        """Return pooled mean and variance with a graph to those biases that no operator's node makes a gradient of."""
        mean, var = statistics.mean, statistics.var
        for call in calls:
            if call is not None and call.bias_is_apart and call.bias is not None and call.bias.requires_grad:
                assert statistics.bias_jacobian is not None
                nothing = call.bias - call.bias.detach()  # 0, with a gradient of 1
                mean = mean + nothing * statistics.bias_jacobian[0]
                var = var + nothing * statistics.bias_jacobian[1]
        return mean, var

    def follow(self, statistics: Statistics, calls: Calls) -> tuple[Tensor, Tensor]:
        """Return pooled mean and variance with a graph to the operators' weights and biases.

        In a compiled step the norms that read one output share it, so that the weight's gradient is made once.
        """
        sole = calls[0] if torch.compiler.is_compiling() and self.direct and calls else None
        shared = {} if sole is None else sole.shared()
        if ("followed", self) in shared:
            followed: tuple[Tensor, Tensor] = shared["followed", self]
            return followed
        mean, var = statistics.mean, statistics.var
        for i, (term, jacobian) in enumerate(zip(self.terms, statistics.jacobians, strict=False)):
            call = calls[i] if calls else None
            weight = term.weight() if call is None or call.weight is None else call.weight
            if weight is None or not weight.requires_grad:
                continue
            mean, var = C.follow_weight(mean, var, weight, term.geometry, jacobian)
            bias = term.bias() if call is None else call.bias
            if bias is not None and bias.requires_grad and statistics.bias_jacobian is not None:
                nothing = bias - bias.detach()  # 0, with a gradient of 1
                mean = mean + nothing * statistics.bias_jacobian[0]
                var = var + nothing * statistics.bias_jacobian[1]
        shared["followed", self] = mean, var
        return mean, var


def _complete(call: Call, term: Term) -> None:
    """Let a hook on the module tell what the graph does not show."""
    if isinstance(call, NodeCall) and term.producer is not None:
        term.producer.copies = call.is_freed
    if not call.is_seen and isinstance(call, NodeCall) and term.producer is not None:
        # Before torch 2.13 hooks that are set now hide calls that were made outside of them as well.
        held = term.producer.recall()
        if held is not None and held.output_sizes == call.output_sizes:
            call.see(held)


def _negated(flag: bool | Tensor) -> Any:
    return not flag if isinstance(flag, bool) else ~flag


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    # torch 2.8 cannot trace the first question; a device that is compiled for has an answer to the second.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    needed = available and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if needed else nullcontext()
