"""What feeds a run of channels of a norm: its operators, and what is remembered of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from crossbn import functional as C  # the library's F
from crossbn.nn import quick
from crossbn.nn.deeper import Deeper
from crossbn.nn.form_choice import make_form
from crossbn.nn.forms import Form, Influence, Observation, Recollection, Shapes, total
from crossbn.nn.guarded import GuardedBatchNorm
from crossbn.nn.history import History, Row
from crossbn.nn.producer import Producer
from crossbn.nn.replay import may_be_replayed
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Statistics, Today, join


class Named(Protocol):
    """What a source has to know of a norm."""

    label: str
    settings: Settings


class Past(NamedTuple):
    """Moments of the remembered steps without bias, [R, C] each, the latest step first."""

    mean: Tensor
    var: Tensor
    compensated_mean: Tensor
    compensated_var: Tensor
    """Negative where the polynomial has left its range."""


class Source:
    """The producers that are summed into a run of channels, and the history of its statistics.

    Without producers the moments are pooled as they are. Norms that read the same output of the same
    producer (DenseNet) share its source, which then computes once per step.
    """

    def __init__(
        self,
        channels: int,
        producers: tuple[Producer, ...],
        settings: Settings,
        like: Tensor,
        direct: bool = False,
    ) -> None:
        self.channels = channels
        self.producers = producers
        self.direct = direct
        self.deeper: Deeper | None = None
        self.readers = 0
        self._current: Statistics | None = None
        self._followed: tuple[Tensor, Tensor] | None = None
        self._unread = 0
        self.site: C.Site | None = None
        for producer in producers:
            producer.sources.append(self)
        if producers:
            like = next(producers[0].module.parameters())
        self.form: Form | None = make_form(producers, direct, settings)
        self.history = History(settings.window - 1, self._shapes(), like, settings.history_dtype)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "site": None}  # full of addresses

    def _shapes(self) -> Shapes:
        shapes: Shapes = {"mean": (self.channels,), "var": (self.channels,), "count": ()}
        if self.form is not None:
            shapes |= self.form.shapes(self.channels)
        return shapes if self.deeper is None else shapes | self.deeper.shapes(self.channels)

    def reach_(self, operator: nn.Module | None, settings: Settings) -> None:
        """Compensate for the weight of `operator`, the one before the previous norm, too; None for no longer."""
        if self.deeper is not None:
            self.deeper.release()
        self.deeper = None if operator is None else Deeper(operator, self)
        self.configure_(settings)

    def configure_(self, settings: Settings) -> None:
        """Fit the history to new settings; it is kept unless it lacks what they need."""
        self.form = make_form(self.producers, self.direct, settings)
        self.site = None
        shapes = self._shapes()
        if shapes.keys() != self.history.rings.keys() or settings.history_dtype != self.history.narrow:
            self.history = History(settings.window - 1, shapes, self.history["mean"], settings.history_dtype)
        elif self.history.slots != settings.window - 1:
            self.history.resize_(settings.window - 1)
        self.history.fit_(shapes)

    def start_step(self) -> None:
        """A producer has run: what was computed before is of an earlier step."""
        self._current = self._followed = None
        self._unread = self.readers

    def finish_step(self) -> None:
        """A norm is done; the last one lets go of the step."""
        self._unread = max(self._unread - 1, 0)  # the same number at the end of every step, for compiled ones
        if self._unread == 0:
            self._current = self._followed = None
            for producer in self.producers:
                producer.finish_step()

    def release(self) -> None:
        """Stop feeding a norm; the last one lets go of the producers."""
        self.readers -= 1
        if not self.readers:
            if self.deeper is not None:
                self.deeper.release()
            for producer in self.producers:
                producer.release(self)

    @property
    def current(self) -> Statistics | None:
        """The statistics at this step, if a norm has asked for them already."""
        return self._current

    def observe(
        self,
        x: Tensor,
        moments: tuple[Tensor, Tensor],
        finite: bool | Tensor,
        active: bool | Tensor,
        remember: bool,
        norm: Named,
    ) -> None:
        """Compute the statistics at this step, unless that is done.

        Args:
            x: the channels that this source feeds, [N, C, ...]; with their graph if it has to reach deeper.
            moments: its mean and biased variance.
            finite: whether the moments of all the norm's channels are.
            active: where false the window is 1 and nothing is remembered.
            remember: whether this step enters the history.
            norm: who asks.
        """
        if self._current is None and finite is True and active is True:
            self.observe_quickly(x, moments, remember, norm)
        if self._current is None:
            with torch.no_grad(), _full_precision(x.device.type):
                self._current = self._observe(x, *moments, finite, active, remember, norm)

    def observe_quickly(
        self,
        x: Tensor,
        moments: tuple[Tensor, Tensor] | None,
        remember: bool,
        asking: Named,
        norm: GuardedBatchNorm | None = None,
    ) -> Tensor | None:
        """Do the same in compiled code where that is possible, and nothing where it is not; see `quick.observe`.

        Returns:
            The output of `norm`, where it could be done.
        """
        found = quick.observe(self, x, moments, remember, asking, norm) if C.library.in_use() else None
        self._current, output = (None, None) if found is None else found
        return output

    def sole_followed(self, statistics: Statistics) -> C.Followed | None:
        """Return the weight that the statistics follow, if it is the only one and only one norm reads the source."""
        if self.readers > 1 or len(statistics.jacobians) != 1 or statistics.bias_jacobian is not None:
            return None
        producer, jacobian = self.producers[0], statistics.jacobians[0]
        if (graft := producer.graft()) is not None:
            return C.Followed(None, producer.geometry, jacobian, graft.deliver)
        return C.Followed(producer.weight(), producer.geometry, jacobian)

    def follow(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Return pooled mean and variance with a graph to the producers' weights and biases.

        The graph is shared by the norms of a step, so that the weights' gradient is made once, from the sum of what the
        norms send; but not with a region that is computed again, which brings its own.
        """
        shared = statistics is self._current and not may_be_replayed()
        if shared and self._followed is not None:
            return self._followed
        mean, var = statistics.mean, statistics.var
        for producer, jacobian in zip(self.producers, statistics.jacobians, strict=False):
            mean, var = C.follow_weight(mean, var, C.Followed(producer.weight(), producer.geometry, jacobian))
            if producer.bias is not None and statistics.bias_jacobian is not None:
                nothing = producer.bias - producer.bias.detach()  # 0, with a gradient of 1
                mean = mean + nothing * statistics.bias_jacobian[0]
                var = var + nothing * statistics.bias_jacobian[1]
        if shared:
            self._followed = mean, var
        return mean, var

    @torch.no_grad()
    def past(self) -> Past:
        """Return the remembered moments as they were and at the present weights, the latest step first."""
        rings, _ = self.history.recall()
        steps = len(rings["mean"])
        order = (int(self.history.pushed) - 1 - torch.arange(steps)) % max(steps, 1)
        mean, var = rings["mean"], rings["var"]
        weights = [producer.weight_value(mean.dtype) for producer in self.producers]
        shifted = mean, var
        if (past := self._recollect(rings, weights)) is not None:
            shifted = C.compensate(mean, var, *past.drift)
        return Past(mean[order], var[order], shifted[0][order], shifted[1][order])

    def _observe(
        self,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        finite: bool | Tensor,
        active: bool | Tensor,
        remember: bool,
        norm: Named,
    ) -> Statistics:
        settings, history = norm.settings, self.history
        history.move_(mean)
        if self.deeper is not None:
            self.deeper.forget_replaced()
        used = self.producers if self.form is not None and settings.window > 1 else ()
        weights = [producer.weight_value(mean.dtype) for producer in used]
        biases = [producer.bias.to(mean.dtype) for producer in used if producer.bias is not None]
        bias = total(biases) if biases else None
        rings, present = history.recall()
        if settings.decay != 1:
            present = history.aged_votes(settings.decay, rings["mean"], present)
        past = self._recollect(rings, weights)
        today = Today(mean, var, x.numel() // x.shape[1], finite, None if past is None else past.drift, None)
        if (group := settings.active_group) is not None:
            today = join(today, group)
        # A batch that is not finite gets plain BatchNorm: nothing remembered takes part, nor is it remembered.
        accept = today.finite if active is True else today.finite & active
        if history.is_readable:
            accept, today = bool(accept), today._replace(finite=bool(today.finite))
            present = present if accept else mean.new_zeros(len(rings["mean"]))
        elif present is not None:
            present = present * accept
        statistics = self._pool(today, bias, rings, past, present, settings)
        if remember and settings.window > 1 and accept is not False:
            seen = Observation(x, today, bias, weights, norm.label)
            history.push(*self._row(seen, accept))
        return statistics

    def _recollect(self, rings: dict[str, Tensor], weights: list[Tensor]) -> Recollection | None:
        """Return what the remembered steps tell at these weights; None if they are not compensated."""
        if self.form is None or not weights:
            return None
        past = self.form.recollect(rings, weights)
        return past if self.deeper is None else past._replace(drift=self.deeper.add_drift(rings, past.drift))

    def _row(self, seen: Observation, accept: bool | Tensor) -> tuple[Row, bool | Tensor]:
        """Return what to remember of today, and whether to."""
        mean = seen.today.mean
        row: Row = {"mean": mean if seen.bias is None else mean - seen.bias, "var": seen.today.var}
        row["count"] = torch.as_tensor(seen.today.positions, device=mean.device)
        if self.form is not None and seen.weights:
            row |= self.form.remember(seen, self.history)
            if self.deeper is not None:
                row |= (earlier := self.deeper.remember(seen.x, mean, seen.label))
                accept = accept & C.all_finite(*earlier.values())
            # Inputs that a stride skips may be infinite without the moments knowing.
            for i, producer in enumerate(self.producers):
                if not producer.geometry.reads_every_input and (grad := self.form.mean_grad_in(row, i)) is not None:
                    accept = accept & C.all_finite(grad)
        return self.history.completed(row), accept

    def _pool(
        self,
        today: Today,
        bias: Tensor | None,
        rings: dict[str, Tensor],
        past: Recollection | None,
        present: Tensor | None,
        settings: Settings,
    ) -> Statistics:
        past_mean, past_var = rings["mean"], rings["var"]
        if today.drift is not None:
            past_mean, past_var = C.compensate(past_mean, past_var, *today.drift)
        if bias is not None:
            past_mean = past_mean + bias
        pooled = C.pool(today.mean, today.var, past_mean, past_var, present, settings.invalid)
        jacobians: tuple[C.Jacobian, ...] = ()
        bias_jacobian = None
        earlier = None
        through = settings.backward == "through" and len(past_mean) > 0
        if through and self.form is not None and past is not None and today.drift is not None:
            towards = (pooled.weight * pooled.deviation).mul_(2)
            influence = Influence(pooled.weight, pooled.weight * pooled.valid, towards)
            jacobians = self.form.jacobians(rings, past._replace(drift=today.drift), influence)
            if self.deeper is not None:
                earlier = self.deeper.jacobian(rings, today.drift, influence)
            if bias is not None:
                local = 1 if today.local is None else today.local
                bias_jacobian = pooled.weight.sum(0) * local, towards.sum(0) * local
        counted: float | Tensor
        if present is None and settings.invalid == "max":
            counted = float(rings["count"].sum()) + today.positions
        else:
            counted = ((pooled.weight > 0) * rings["count"].unsqueeze(1)).sum(0) + today.positions
        several = counted > 1
        bessel = counted / (counted - 1 * several)  # a lone position keeps its variance, 0
        return Statistics(
            pooled.mean,
            pooled.var,
            pooled.share,
            bessel,
            several,
            today.positions,
            today.finite,
            jacobians,
            bias_jacobian,
            earlier,
        )


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    needed = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if needed else nullcontext()
