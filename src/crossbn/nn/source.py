"""What feeds a run of channels of a norm: its operators, and what is remembered of them."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.history import History
from crossbn.nn.producer import Producer
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Drift, Jacobian, Statistics, Today, join


class Named(Protocol):
    """What a source has to know of a norm."""

    label: str
    settings: Settings


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
        self.direct = direct  # the channels are the output of the one producer, nothing added
        self.readers = 0
        self._current: Statistics | None = None
        self._unread = 0
        for producer in producers:
            producer.sources.append(self)
        if producers:
            like = next(producers[0].module.parameters())
        self.history = History(settings.window - 1, self._shapes(settings), like)

    def _shapes(self, settings: Settings) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"mean": (self.channels,), "var": (self.channels,), "count": ()}
        if settings.order == 0 or not self.producers:
            return shapes
        shapes |= {"mean_at": (self.channels,), "var_at": (self.channels,)}
        samples = settings.positions or 0
        for i, producer in enumerate(self.producers):
            groups, patch = producer.geometry.groups, producer.geometry.patch_size
            shapes |= {f"{i}.mean_grad": (groups, patch), f"{i}.var_grad": (self.channels, patch)}
            if settings.order == 2:
                shapes[f"{i}.samples"] = (groups, patch, samples)
        if settings.order == 2:
            shapes["samples"] = (self.channels, samples)
        return shapes

    def configure_(self, settings: Settings) -> None:
        """Fit the history to new settings; it is kept unless it lacks what they need."""
        shapes = self._shapes(settings)
        if shapes.keys() != self.history.rings.keys():
            self.history = History(settings.window - 1, shapes, self.history["mean"])
        elif self.history.slots != settings.window - 1:
            self.history.resize_(settings.window - 1)

    def start_step(self) -> None:
        """A producer has run: what was computed before is of an earlier step."""
        self._current = None
        self._unread = self.readers

    def finish_step(self) -> None:
        """A norm is done; the last one lets go of the step."""
        self._unread = max(self._unread - 1, 0)  # the same number at the end of every step, for compiled ones
        if self._unread == 0:
            self._current = None
            for producer in self.producers:
                producer.finish_step()

    def release(self) -> None:
        """Stop feeding a norm; the last one lets go of the producers."""
        self.readers -= 1
        if not self.readers:
            for producer in self.producers:
                producer.release(self)

    def statistics(
        self, x: Tensor, mean: Tensor, var: Tensor, finite: Tensor, active: Tensor | None, remember: bool, norm: Named
    ) -> Statistics:
        """Return the statistics at this step, computed by the first norm to ask.

        Args:
            x: the channels that this source feeds, [N, C, ...].
            mean: its mean.
            var: its biased variance.
            finite: scalar; whether the moments of all the norm's channels are.
            active: scalar; where false the window is 1 and nothing is remembered. None is true.
            remember: whether this step enters the history.
            norm: who asks.
        """
        if self._current is None:
            self.history.move_(mean)
            used = self.producers if norm.settings.order and norm.settings.window > 1 else ()
            weights = [producer.weight_value().to(mean.dtype) for producer in used]
            with torch.no_grad(), _full_precision(x.device.type):
                self._current = self._observe(x, mean, var, weights, finite, active, remember, norm)
        return self._current

    def follow(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Return pooled mean and variance with a graph to the producers' weights and biases."""
        mean, var = statistics.mean, statistics.var
        for producer, jacobian in zip(self.producers, statistics.jacobians, strict=False):
            mean, var = C.follow_weight(mean, var, producer.weight(), *jacobian)
            if producer.bias is not None and statistics.bias_jacobian is not None:
                nothing = producer.bias - producer.bias.detach()  # 0, with a gradient of 1
                mean = mean + nothing * statistics.bias_jacobian[0]
                var = var + nothing * statistics.bias_jacobian[1]
        return mean, var

    def _observe(
        self,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weights: list[Tensor],
        finite: Tensor,
        active: Tensor | None,
        remember: bool,
        norm: Named,
    ) -> Statistics:
        settings = norm.settings
        bias = _sum([p.bias.to(mean.dtype) for p in self.producers if weights and p.bias is not None])
        positions = mean.new_full((), x.numel() // x.shape[1])
        today = Today(mean, var, positions, finite, self._drift(weights), None)
        if (group := settings.active_group) is not None:
            today = join(today, group)
        # A batch that is not finite gets plain BatchNorm: nothing remembered takes part, nor is it remembered.
        accept = today.finite if active is None else today.finite & active
        statistics = self._pool(today, bias, weights, accept, settings)
        if remember and settings.window > 1:
            linear_mean = today.mean if bias is None else today.mean - bias
            row = {"mean": linear_mean, "var": today.var, "count": today.positions}
            if weights:
                row |= self._sensitivities(x, today, bias, weights, norm)
                # Inputs that a stride skips may be infinite without the moments knowing.
                for i in range(len(weights)):
                    accept = accept & torch.isfinite(row[f"{i}.mean_grad"]).all()
            self.history.push(row, accept)
        return statistics

    def _drift(self, weights: list[Tensor]) -> Drift | None:
        if not weights:
            return None
        history = self.history
        shift = _sum([C.project_mean(history[f"{i}.mean_grad"], w) for i, w in enumerate(weights)])
        slope = _sum([C.project_var(history[f"{i}.var_grad"], w) for i, w in enumerate(weights)])
        assert shift is not None
        assert slope is not None
        deviations = self._deviations(weights)
        curvature = None if deviations is None else deviations.square().sum(2)
        return Drift(shift - history["mean_at"], slope - history["var_at"], curvature)

    def _deviations(self, weights: list[Tensor]) -> Tensor | None:
        """Return (W_t - W_s) * y_s at the remembered samples [R, C, P], if there are any."""
        if "samples" not in self.history.rings:
            return None
        projected = _sum([C.project_samples(self.history[f"{i}.samples"], w) for i, w in enumerate(weights)])
        assert projected is not None
        return projected - self.history["samples"]

    def _pool(
        self, today: Today, bias: Tensor | None, weights: list[Tensor], accept: Tensor, settings: Settings
    ) -> Statistics:
        history = self.history
        past_mean, past_var = history["mean"], history["var"]
        if today.drift is not None:
            past_mean, past_var = C.compensate(past_mean, past_var, *today.drift)
        if bias is not None:
            past_mean = past_mean + bias
        pooled = C.pool(today.mean, today.var, past_mean, past_var, history.present() * accept, settings.invalid)
        counted = ((pooled.weight > 0) * history["count"].unsqueeze(1)).sum(0)
        jacobians: tuple[Jacobian, ...] = ()
        bias_jacobian = None
        if settings.backward == "through" and today.drift is not None:
            towards = 2 * pooled.weight * (past_mean - pooled.mean)  # d var / d past_mean
            own = pooled.weight * pooled.valid  # d var / d past_var
            coefficient = towards - 2 * own * today.drift.mean_shift
            jacobians = tuple(
                Jacobian(history[f"{i}.mean_grad"].clone(), pooled.weight, coefficient, jacobian)
                for i, jacobian in enumerate(self._var_jacobians(own, weights))
            )
            if bias is not None:
                local = 1 if today.local is None else today.local
                bias_jacobian = pooled.weight.sum(0) * local, towards.sum(0) * local
        positions = (today.positions + counted).expand_as(pooled.mean)
        return Statistics(
            pooled.mean, pooled.var, pooled.share, positions, today.positions, today.finite, jacobians, bias_jacobian
        )

    def _var_jacobians(self, own: Tensor, weights: list[Tensor]) -> list[Tensor]:
        """Sum the remembered gradients of the variance, weighted by `own` [R, C]: [C, I] for each producer."""
        deviations = self._deviations(weights)
        jacobians = []
        for i in range(len(weights)):
            grads = self.history[f"{i}.var_grad"].unbind()
            shares = own.unsqueeze(2).unbind()
            jacobian = grads[0] * shares[0]
            for grad, share in zip(grads[1:], shares[1:], strict=True):
                jacobian.addcmul_(grad, share)
            if deviations is not None:
                samples = self.history[f"{i}.samples"]
                scaled = (2 * own.unsqueeze(2) * deviations).unflatten(1, (samples.shape[1], -1))
                jacobian += (scaled @ samples.mT).sum(0).flatten(0, 1)
            jacobians.append(jacobian)
        return jacobians

    def _sensitivities(
        self, x: Tensor, today: Today, bias: Tensor | None, weights: list[Tensor], norm: Named
    ) -> dict[str, Tensor]:
        """Return today's gradients and, to take off later, their products with today's weights."""
        sizes, settings = x.shape[2:], norm.settings
        amount = C.choose_amount(settings.positions, sizes, len(x), max(w.numel() for w in weights))
        where = None if amount is None else C.sample_positions(sizes, amount, self.history.pushed)
        outputs = None if where is None else C.outputs_at(x, where)
        # x itself is linear in the weights, and known as exactly as they are.
        homogeneous = self.direct and today.local is None and x.dtype == today.mean.dtype
        row: dict[str, Tensor] = {}
        for i, (producer, weight) in enumerate(zip(self.producers, weights, strict=True)):
            if not producer.has_run and any(other.has_run for other in self.producers):
                continue  # a branch of the sum that this step leaves out
            y, geometry = producer.input_for(x, norm.label), producer.geometry
            mean_grad = C.mean_grad(y, geometry, sizes)
            if where is None or outputs is None:
                var_grad = C.var_grad(x, today.mean, y, weight, geometry)
            else:
                var_grad = C.sampled_var_grad(outputs, today.mean, C.patches_at(y, geometry, where, sizes))
            if today.local is not None:
                mean_grad, var_grad = mean_grad * today.local, var_grad * today.local
            row |= {f"{i}.mean_grad": mean_grad, f"{i}.var_grad": var_grad}
            if settings.order == 2:
                row |= self._samples(C.patches_at(y, geometry, _or_all(where, x), sizes), i, weight, row, today.local)
            if not homogeneous:
                _add(row, "mean_at", C.project_mean(mean_grad.unsqueeze(0), weight)[0])
                _add(row, "var_at", C.project_var(var_grad.unsqueeze(0), weight)[0])
        if homogeneous:
            row |= self._products_by_euler(today, outputs, bias)
        made = {*row, "mean", "var", "count"}
        return row | {n: torch.zeros_like(ring[0]) for n, ring in self.history.rings.items() if n not in made}

    def _products_by_euler(self, today: Today, outputs: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
        """Return <mean_grad, W> and <var_grad, W> without looking at W: E[x - b] and 2 E[(x - mean) (x - b)]."""
        mean_at = today.mean if bias is None else today.mean - bias
        if outputs is None:
            return {"mean_at": mean_at, "var_at": 2 * today.var}
        linear = outputs if bias is None else outputs - bias.unsqueeze(1)
        return {"mean_at": mean_at, "var_at": 2 * ((outputs - today.mean.unsqueeze(1)) * linear).mean((0, 2))}

    def _samples(
        self, patches: Tensor, i: int, weight: Tensor, row: dict[str, Tensor], local: Tensor | None
    ) -> dict[str, Tensor]:
        """Arrange patches [N, groups, I, S] as the history's [groups, I, P], so that a sum over P is a mean."""
        flat = patches.permute(1, 2, 0, 3).flatten(2)
        for name in ("samples", f"{i}.samples"):
            self.history.widen_(name, flat.shape[2])
        share = 1.0 if local is None else local
        samples = F.pad(flat * (share / flat.shape[2]) ** 0.5, (0, self.history["samples"].shape[-1] - flat.shape[2]))
        projected = C.project_samples(samples.unsqueeze(0), weight)[0]
        return {f"{i}.samples": samples, "samples": row["samples"] + projected if "samples" in row else projected}


def _sum(tensors: list[Tensor]) -> Tensor | None:
    return functools.reduce(torch.add, tensors) if tensors else None


def _add(row: dict[str, Tensor], name: str, term: Tensor) -> None:
    row[name] = row[name] + term if name in row else term


def _or_all(where: Tensor | None, x: Tensor) -> Tensor:
    return C.all_positions(x.shape[2:], x.device) if where is None else where


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()
