"""What a source remembers of how its moments change with the weights: gradients, or the samples they are made of.

A form says which tensors it keeps, makes today's (`remember`), and tells of the remembered ones how far the weights
have moved the moments since (`recollect`) and how the pooled statistics follow today's weights (`jacobians`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.history import History, Pieces, Row
from crossbn.nn.producer import Producer
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Drift, Today

_SMALL = 2**17

Rings = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Observation(NamedTuple):
    """A training step, as the forms look at it."""

    x: Tensor
    today: Today
    bias: Tensor | None
    weights: list[Tensor]
    label: str


class Recollection(NamedTuple):
    """What the remembered steps tell at today's weights."""

    drift: Drift
    rows: list[Tensor]
    """[R, 1 + P, groups, I] for each producer: of each step the mean patch, then the samples'."""
    change: Tensor | None
    """[R, 1 + P, C]: of the mean, and of the output at the samples."""


class Influence(NamedTuple):
    """How the pooled statistics depend on the remembered moments."""

    weight: Tensor
    """[R, C] or [R, 1]: d mean / d past_mean."""
    own: Tensor
    """[R, C]: d var / d past_var."""
    towards: Tensor
    """[R, C]: d var / d past_mean."""


class Form(ABC):
    """How the sensitivity of a source's moments to the weights of its producers is kept."""

    def __init__(
        self, producers: tuple[Producer, ...], direct: bool, positions: int | None, settings: Settings
    ) -> None:
        self.producers = producers
        self.direct = direct  # the channels are the output of the one producer, nothing added
        self.positions = positions
        self.order = settings.order
        # The mean patch is taken off for its noise; joined processes have different means, and keep it.
        self.centres = not settings.sync

    @abstractmethod
    def shapes(self, channels: int) -> Shapes:
        """Return what is kept of a step."""

    @abstractmethod
    def recollect(self, rings: Rings, weights: list[Tensor]) -> Recollection:
        """Return what the weights' change since has done to each remembered step."""

    @abstractmethod
    def jacobians(self, rings: Rings, recollection: Recollection, influence: Influence) -> tuple[C.Jacobian, ...]:
        """Return how the pooled statistics follow each producer's weight."""

    @abstractmethod
    def remember(self, seen: Observation, history: History) -> Row:
        """Return what is to be kept of today."""

    @abstractmethod
    def pool(self, rings: Rings, weight: Tensor, batch: C.native.Batch) -> C.Jacobian | None:
        """Pool a batch with what is remembered, in compiled code; return how the result follows the weight.

        None if the batch is not finite.
        """

    @abstractmethod
    def write(self, site: C.Site, step: C.native.Step, slot: Rings) -> bool:
        """Write a step to its place in the history, in compiled code; False if its input is not finite."""

    @staticmethod
    def mean_grad_in(row: Row, i: int) -> Tensor | None:
        """Return the mean patch of the `i`-th producer in a row, if it is there."""
        found = row.get(f"{i}.rows", row.get(f"{i}.mean_grad"))
        return found.first if isinstance(found, Pieces) else found

    def _samples(self, seen: Observation, history: History) -> tuple[C.Places, Tensor]:
        """Choose today's positions; return them and the outputs there, less their mean [P, C]."""
        x = seen.x
        places = C.sample_places(len(x), x.shape[2:].numel(), self.positions, history.step, x.device)
        return places, C.outputs_at(x, places).sub_(seen.today.mean)

    def _by_euler(self, seen: Observation, history: History) -> bool:
        """Whether `x` says what the weights make of the inputs: its own producer's, in one process, unrounded."""
        exact = seen.x.dtype == seen.today.mean.dtype and history.narrow is None
        return self.direct and exact and seen.today.local is None

    def _input(self, producer: Producer, seen: Observation) -> Tensor | None:
        """Return what the producer read, None for a branch of the sum that this step leaves out."""
        if not producer.has_run and any(other.has_run for other in self.producers):
            return None
        return producer.input_for(seen.x, seen.label)

    def _patches(self, producer: Producer, y: Tensor, places: C.Places, mean_grad: Tensor, seen: Observation) -> Tensor:
        patches = C.patches_at(y, producer.geometry, places, seen.x.shape[2:])
        return patches.sub_(mean_grad) if self.centres else patches


class Gradients(Form):
    """Keeps the gradient of the mean, one patch, and that of the variance, of the weight's size."""

    def shapes(self, channels: int) -> Shapes:
        """Return what is kept of a step."""
        shapes: Shapes = {"mean_at": (channels,), "var_at": (channels,)}
        for i, producer in enumerate(self.producers):
            size = producer.geometry.patch_size
            shapes |= {f"{i}.mean_grad": (producer.geometry.groups, size), f"{i}.var_grad": (channels, size)}
        return shapes

    def recollect(self, rings: Rings, weights: list[Tensor]) -> Recollection:
        """Return what the weights' change since has done to each remembered step."""
        rows = [rings[f"{i}.mean_grad"] for i in range(len(weights))]
        shift = total(list(map(C.project, rows, weights))).sub_(rings["mean_at"])
        slope = total([C.project_var(rings[f"{i}.var_grad"], weight) for i, weight in enumerate(weights)])
        return Recollection(Drift(shift, slope.sub_(rings["var_at"]), None), [each.unsqueeze(1) for each in rows], None)

    def jacobians(self, rings: Rings, recollection: Recollection, influence: Influence) -> tuple[C.Jacobian, ...]:
        """Return how the pooled statistics follow each producer's weight."""
        weight, own, towards = influence
        coefficient = torch.addcmul(towards, own, recollection.drift.mean_shift, value=-2).unsqueeze(1)
        return tuple(
            C.Jacobian(rows.clone(), weight, coefficient, _weighted_sum(own, rings[f"{i}.var_grad"]))
            for i, rows in enumerate(recollection.rows)
        )

    def pool(self, rings: Rings, weight: Tensor, batch: C.native.Batch) -> C.Jacobian | None:
        """Pool a batch with what is remembered, in compiled code; return how the result follows the weight."""
        past = C.native.Gradients(rings["0.mean_grad"], rings["0.var_grad"], rings["mean_at"], rings["var_at"])
        finite, towards, rest = C.native.pool_gradients(batch, rings["mean"], rings["var"], weight, past)
        votes, _ = C.equal_votes(towards.shape[0], towards.dtype, towards.device)
        rows = past.mean_grad.unsqueeze(1).clone()
        return C.Jacobian(rows, votes, towards.unsqueeze(1), rest) if finite else None

    def write(self, site: C.Site, step: C.native.Step, slot: Rings) -> bool:
        """Write a step to its place in the history, in compiled code; False if its input is not finite."""
        return C.native.remember_gradients(site.structure, step, slot)

    def remember(self, seen: Observation, history: History) -> Row:
        """Return today's gradients and, to take off later, their products with today's weights."""
        x, today = seen.x, seen.today
        samples = None
        if self.positions is not None:
            places, centred = self._samples(seen, history)
            samples = places, centred, centred * (2 / len(centred))
        by_euler = self._by_euler(seen, history)
        row: Rings = {}
        for i, (producer, weight) in enumerate(zip(self.producers, seen.weights, strict=True)):
            if (y := self._input(producer, seen)) is None:
                continue
            mean_grad = C.mean_grad(y, producer.geometry, x.shape[2:])
            if samples is None:
                var_grad = C.var_grad(x, today.mean, y, weight, producer.geometry)
            else:
                var_grad = C.spread(samples[2], self._patches(producer, y, samples[0], mean_grad, seen))
            if today.local is not None:
                mean_grad, var_grad = mean_grad * today.local, var_grad * today.local
            mean_grad, var_grad = history.rounded(mean_grad), history.rounded(var_grad)
            row |= {f"{i}.mean_grad": mean_grad, f"{i}.var_grad": var_grad}
            if not by_euler:
                _add(row, "mean_at", C.project(mean_grad.unsqueeze(0), weight)[0])
                _add(row, "var_at", C.project_var(var_grad.unsqueeze(0), weight)[0])
        if by_euler:  # <mean_grad, W> = E[x - b] and <var_grad, W> = 2 E[(x - mean)^2]
            row["mean_at"] = today.mean if seen.bias is None else today.mean - seen.bias
            row["var_at"] = 2 * today.var if samples is None else samples[1].mul_(samples[2]).sum(0)
        return dict(row)


class Samples(Form):
    """Keeps patches at a few positions, what the weights made of them, and how far the output was from its mean.

    Today's weights applied to those patches give the change q of the output itself, and with it the variance's:
    2 E[(x - mean) q], and E[q^2] for order 2. The mean patch is a row like the others, the first: one product does all.
    Rows of 0, where a batch had fewer positions, add nothing.

    | kept | first row | the others |
    |---|---|---|
    | `rows` | mean patch | patch |
    | `products` | <row, W> | <row, W> |
    | `centred` | 0 | 2 (x - mean) / P |

    Order 2 squares changes, so there the factor 1 / P is split: its root goes to the rows, and one remains.
    """

    def shapes(self, channels: int) -> Shapes:
        """Return what is kept of a step."""
        amount = 1 + (self.positions or 0)
        shapes: Shapes = {"products": (amount, channels), "centred": (amount, channels)}
        for i, producer in enumerate(self.producers):
            shapes[f"{i}.rows"] = amount, producer.geometry.groups, producer.geometry.patch_size
        return shapes

    def recollect(self, rings: Rings, weights: list[Tensor]) -> Recollection:
        """Return what the weights' change since has done to each remembered step."""
        rows, at = [rings[f"{i}.rows"] for i in range(len(weights))], rings["products"]
        products = total([C.project(each.flatten(0, 1), weight) for each, weight in zip(rows, weights, strict=True)])
        change = products.view_as(at).sub_(at)
        shift, curvature = change[:, 0], None
        if self.order == 2:
            curvature = change[:, 1:].square().sum(1)
            if self.centres:
                curvature = torch.addcmul(curvature, shift, shift)
        return Recollection(Drift(shift, (rings["centred"] * change).sum(1), curvature), rows, change)

    def jacobians(self, rings: Rings, recollection: Recollection, influence: Influence) -> tuple[C.Jacobian, ...]:
        """Return how the pooled statistics follow each producer's weight."""
        (weight, own, coefficient), centred = influence, rings["centred"]
        if self.order == 2:
            assert recollection.change is not None
            centred = torch.add(centred, recollection.change, alpha=2)
        if self.order == 1 or not self.centres:  # else the square of the mean's shift is in the curvature as well
            coefficient = torch.addcmul(coefficient, own, recollection.drift.mean_shift, value=-2)
        var_coefficient = own.unsqueeze(1) * centred
        var_coefficient[:, 0] = coefficient
        return tuple(C.Jacobian(rows.clone(), weight, var_coefficient, None) for rows in recollection.rows)

    def pool(self, rings: Rings, weight: Tensor, batch: C.native.Batch) -> C.Jacobian | None:
        """Pool a batch with what is remembered, in compiled code; return how the result follows the weight."""
        rows, at = rings["0.rows"], rings["products"]
        product = C.project(rows.flatten(0, 1), weight).view_as(at)
        finite = C.native.pool_samples(batch, rings["mean"], rings["var"], product, at, rings["centred"])
        votes, _ = C.equal_votes(at.shape[0], at.dtype, at.device)
        return C.Jacobian(rows.clone(), votes, product, None) if finite else None

    def write(self, site: C.Site, step: C.native.Step, slot: Rings) -> bool:
        """Write a step to its place in the history, in compiled code; False if its input is not finite."""
        return C.native.remember_samples(site.structure, step, slot)

    def remember(self, seen: Observation, history: History) -> Row:
        """Return today's rows, and what the weights made of them."""
        places, centred = self._samples(seen, history)
        share = (1 if seen.today.local is None else seen.today.local) / len(centred)
        scale = share**0.5 if self.order == 2 else 1
        by_euler = self._by_euler(seen, history)
        row: Row = {"centred": Pieces(None, centred * (2 * share / scale))}
        at: Rings = {}
        for i, (producer, weight) in enumerate(zip(self.producers, seen.weights, strict=True)):
            if (y := self._input(producer, seen)) is None:
                continue
            mean_grad = C.mean_grad(y, producer.geometry, seen.x.shape[2:])
            patches = self._patches(producer, y, places, mean_grad, seen)
            patches = history.rounded(patches if scale == 1 else patches * scale)
            mean_grad = history.rounded(mean_grad if seen.today.local is None else mean_grad * seen.today.local)
            row[f"{i}.rows"] = Pieces(mean_grad, patches)
            if not by_euler:
                _add(at, "mean", C.project(mean_grad.unsqueeze(0), weight)[0])
                _add(at, "samples", C.project(patches, weight))
        if by_euler:
            at["mean"] = seen.today.mean if seen.bias is None else seen.today.mean - seen.bias
            at["samples"] = centred if self.centres else centred.add_(at["mean"])
            if scale != 1:
                at["samples"] *= scale
        row["products"] = Pieces(at["mean"], at["samples"])
        return row


def make_form(producers: tuple[Producer, ...], direct: bool, settings: Settings) -> Form | None:
    """Choose the form for the producers of a source; None if nothing is compensated."""
    if settings.order == 0 or not producers:
        return None
    plans = [
        C.choose_plan(producer.geometry, settings.positions, settings.window - 1, settings.order)
        for producer in producers
    ]
    kind = Samples if any(plan.form == "samples" for plan in plans) else Gradients
    amounts = [plan.positions for plan in plans if plan.positions is not None]
    return kind(producers, direct, min(amounts, default=None), settings)


def total(tensors: list[Tensor]) -> Tensor:
    """Add tensors up."""
    return functools.reduce(torch.add, tensors)


def _weighted_sum(weights: Tensor, tensors: Tensor) -> Tensor:
    """Return the sum over r of weights_rc tensors_rci."""
    if tensors.numel() <= _SMALL or torch.compiler.is_compiling():
        return (weights.unsqueeze(2) * tensors).sum(0)
    shares, parts = weights.unsqueeze(2).unbind(), tensors.unbind()
    result = parts[0] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        result.addcmul_(part, share)
    return result


def _add(row: Rings, name: str, term: Tensor) -> None:
    row[name] = row[name] + term if name in row else term
