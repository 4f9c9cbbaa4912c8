"""What feeds a run of channels of a norm: its operators, and what is remembered of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.history import History
from crossbn.nn.producer import Producer
from crossbn.nn.settings import Settings


class Named(Protocol):
    """What a source has to know of a norm."""

    label: str
    settings: Settings


class Jacobian(NamedTuple):
    """How the pooled statistics follow the weights of one producer; see `functional.follow_weight`."""

    mean_grad: Tensor
    mean_coefficient: Tensor
    var_coefficient: Tensor
    var_jacobian: Tensor


class Statistics(NamedTuple):
    """What a source says at a training step. Nothing here has a graph."""

    mean: Tensor
    """[C]: pooled."""
    var: Tensor
    """[C]: pooled, biased."""
    share: Tensor
    """[C]: today's weight in them."""
    positions: Tensor
    """[C]: positions pooled."""
    batch_positions: Tensor
    """Scalar: today's, of all processes together."""
    finite: Tensor
    """Scalar: whether today's moments are."""
    jacobians: tuple[Jacobian, ...]
    """One per producer; empty where no gradient goes through the compensation."""
    bias_jacobian: tuple[Tensor, Tensor]
    """[C] each: how the pooled mean and variance follow the producers' biases."""


class _Today(NamedTuple):
    """The present step."""

    mean: Tensor
    var: Tensor
    positions: Tensor
    local: Tensor  # this process's share of the positions
    bias: Tensor
    weights: list[Tensor]


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
        self._unread -= 1
        if self._unread <= 0:
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
        self, x: Tensor, mean: Tensor, var: Tensor, finite: Tensor, active: Tensor, remember: bool, norm: Named
    ) -> Statistics:
        """Return the statistics at this step, computed by the first norm to ask.

        Args:
            x: the channels that this source feeds, [N, C, ...].
            mean: its mean.
            var: its biased variance.
            finite: scalar; whether the moments of all the norm's channels are.
            active: scalar; where false the window is 1 and nothing is remembered.
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
            if producer.bias is not None:
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
        active: Tensor,
        remember: bool,
        norm: Named,
    ) -> Statistics:
        settings = norm.settings
        biases = [p.bias.to(mean.dtype) for p in self.producers if weights and p.bias is not None]
        bias = sum(biases, torch.zeros_like(mean))
        drift = self._drift(weights)
        count = mean.new_tensor(x.numel() // x.shape[1])
        local = torch.ones_like(count)
        if (group := settings.active_group) is not None:
            mean, var, drift, finite, local = _join(mean, var, count, drift, finite, group)
            count = count / local
        today = _Today(mean, var, count, local, bias, weights)
        accept = finite & active
        statistics = self._pool(today, drift, finite, accept, settings)
        if remember and settings.window > 1:
            row = {"mean": mean - bias, "var": var, "count": count}
            if weights:
                row |= self._sensitivities(x, today, norm)
                # Inputs that a stride skips may be infinite without the moments knowing.
                for i in range(len(weights)):
                    accept = accept & torch.isfinite(row[f"{i}.mean_grad"]).all()
            self.history.push(row, accept)
        return statistics

    def _drift(self, weights: list[Tensor]) -> Tensor:
        """Return what the change of weights did to each remembered step: mean shift, slope, curvature, [3, R, C]."""
        history = self.history
        if not weights:
            return torch.zeros_like(history["mean"]).expand(3, -1, -1)
        shift = sum(C.project_mean(history[f"{i}.mean_grad"], w) for i, w in enumerate(weights)) - history["mean_at"]
        slope = sum(C.project_var(history[f"{i}.var_grad"], w) for i, w in enumerate(weights)) - history["var_at"]
        deviations = self._deviations(weights)
        curvature = torch.zeros_like(shift) if deviations is None else deviations.square().sum(2)
        return torch.stack([shift, slope, curvature])

    def _deviations(self, weights: list[Tensor]) -> Tensor | None:
        """Return (W_t - W_s) * y_s at the remembered samples [R, C, P], if there are any."""
        if "samples" not in self.history.rings:
            return None
        projected = sum(C.project_samples(self.history[f"{i}.samples"], w) for i, w in enumerate(weights))
        return projected - self.history["samples"]

    def _pool(self, today: _Today, drift: Tensor, finite: Tensor, accept: Tensor, settings: Settings) -> Statistics:
        history = self.history
        past_mean, past_var = C.compensate(history["mean"] + today.bias, history["var"], *drift)
        # A batch that is not finite gets plain BatchNorm: nothing remembered takes part.
        present = history.present() * accept
        pooled = C.pool(today.mean, today.var, past_mean, past_var, present, settings.invalid)
        counted = (pooled.weight > 0) * history["count"].unsqueeze(1)
        towards = 2 * pooled.weight * (past_mean - pooled.mean)  # d var / d past_mean
        jacobians: tuple[Jacobian, ...] = ()
        if settings.backward == "through" and today.weights:
            own = pooled.weight * pooled.valid  # d var / d past_var
            coefficient = towards - 2 * own * drift[0]
            jacobians = tuple(
                Jacobian(history[f"{i}.mean_grad"].clone(), pooled.weight, coefficient, jacobian)
                for i, jacobian in enumerate(self._var_jacobians(own, today.weights))
            )
        return Statistics(
            pooled.mean,
            pooled.var,
            pooled.share,
            today.positions + counted.sum(0),
            today.positions,
            finite,
            jacobians,
            (pooled.weight.sum(0) * today.local, towards.sum(0) * today.local),
        )

    def _var_jacobians(self, own: Tensor, weights: list[Tensor]) -> list[Tensor]:
        """Sum the remembered gradients of the variance, weighted by `own` [R, C]: [C, I] for each producer."""
        deviations = self._deviations(weights)
        jacobians = []
        for i in range(len(weights)):
            grads = self.history[f"{i}.var_grad"]
            jacobian = grads[0] * own[0].unsqueeze(1)
            for grad, weight in zip(grads[1:], own[1:], strict=True):
                jacobian.addcmul_(grad, weight.unsqueeze(1))
            if deviations is not None:
                samples = self.history[f"{i}.samples"]
                scaled = (2 * own.unsqueeze(2) * deviations).unflatten(1, (samples.shape[1], -1))
                jacobian += (scaled @ samples.mT).sum(0).flatten(0, 1)
            jacobians.append(jacobian)
        return jacobians

    def _sensitivities(self, x: Tensor, today: _Today, norm: Named) -> dict[str, Tensor]:
        """Return today's gradients and, to take off later, their products with today's weights."""
        sizes, settings = x.shape[2:], norm.settings
        amount = C.choose_amount(settings.positions, sizes, len(x), max(w.numel() for w in today.weights))
        where = None if amount is None else C.sample_positions(sizes, amount, self.history.pushed)
        row = {"mean_at": torch.zeros_like(today.mean), "var_at": torch.zeros_like(today.mean)}
        for i, (producer, weight) in enumerate(zip(self.producers, today.weights, strict=True)):
            if not producer.has_run and any(other.has_run for other in self.producers):
                continue  # a branch of the sum that this step leaves out
            y, geometry = producer.input_for(x, norm.label), producer.geometry
            mean_grad = C.mean_grad(y, geometry, sizes)
            if where is None:
                var_grad = C.var_grad(x, today.mean, y, weight, geometry)
            else:
                outputs = C.outputs_at(x, where)
                var_grad = C.sampled_var_grad(outputs, today.mean, C.patches_at(y, geometry, where, sizes))
            if settings.active_group is not None:
                mean_grad, var_grad = mean_grad * today.local, var_grad * today.local
            row |= {f"{i}.mean_grad": mean_grad, f"{i}.var_grad": var_grad}
            if self.direct and where is not None and settings.active_group is None and x.dtype == mean_grad.dtype:
                # Euler: x is homogeneous in the weights, so the products are moments of x itself.
                row["mean_at"] = today.mean - today.bias
                centred, linear = outputs - today.mean.unsqueeze(1), outputs - today.bias.unsqueeze(1)
                row["var_at"] = 2 * (centred * linear).mean((0, 2))
            else:
                row["mean_at"] += C.project_mean(mean_grad.unsqueeze(0), weight)[0]
                row["var_at"] += C.project_var(var_grad.unsqueeze(0), weight)[0]
            if settings.order == 2:
                patches = C.patches_at(y, geometry, C.all_positions(sizes, x.device) if where is None else where, sizes)
                samples = self._scale_samples(patches, i, today.local)
                row[f"{i}.samples"] = samples
                row["samples"] = row.get("samples", 0) + C.project_samples(samples.unsqueeze(0), weight)[0]
        left_out = {
            name: ring for name, ring in self.history.rings.items() if name not in (*row, "mean", "var", "count")
        }
        return row | {name: torch.zeros_like(ring[0]) for name, ring in left_out.items()}

    def _scale_samples(self, patches: Tensor, i: int, local: Tensor) -> Tensor:
        """Arrange patches [N, groups, I, S] as the history's [groups, I, P], so that a sum over P is a mean."""
        samples = patches.permute(1, 2, 0, 3).flatten(2)
        for name in ("samples", f"{i}.samples"):
            self.history.widen_(name, samples.shape[2])
        room = self.history["samples"].shape[-1] - samples.shape[2]
        return F.pad(samples * torch.sqrt(local / samples.shape[2]), (0, room))


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def _join(
    mean: Tensor, var: Tensor, count: Tensor, drift: Tensor, finite: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Join what the processes know of this step; return it with this process's share of the positions.

    Each process keeps its own part of the gradients, scaled by its share, so that drift adds up: one
    collective, and only vectors of the channels' size travel.
    """
    own = torch.cat([mean, var, drift.flatten(), finite.reshape(1).to(mean.dtype), count.reshape(1)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    table = torch.stack(everyone)
    channels = mean.shape[0]
    counts = table[:, -1]
    joint_mean, joint_var = C.join_moments(table[:, :channels], table[:, channels : 2 * channels], counts)
    joint_drift = table[:, 2 * channels : -2].sum(0).unflatten(0, drift.shape)
    return joint_mean, joint_var, joint_drift, table[:, -2].all(), count / counts.sum()
