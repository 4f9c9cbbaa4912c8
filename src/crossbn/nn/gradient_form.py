"""Remembering gradients: for small weights, and for all positions."""

from __future__ import annotations

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.forms import Form, Influence, Observation, Recollection, Rings, Shapes, add_to, total
from crossbn.nn.history import History, Row
from crossbn.nn.statistics import Drift

_SMALL = 2**17


class Gradients(Form):
    """Keeps the gradient of the mean, one patch, and that of the variance, of the weight's size."""

    arrays = ("mean", "var", "count", "0.mean_grad", "mean_at", None, "0.var_grad", "var_at")

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
                add_to(row, "mean_at", C.project(mean_grad.unsqueeze(0), weight)[0])
                add_to(row, "var_at", C.project_var(var_grad.unsqueeze(0), weight)[0])
        if by_euler:  # <mean_grad, W> = E[x - b] and <var_grad, W> = 2 E[(x - mean)^2]
            row["mean_at"] = today.mean if seen.bias is None else today.mean - seen.bias
            row["var_at"] = 2 * today.var if samples is None else samples[1].mul_(samples[2]).sum(0)
        return dict(row)


def _weighted_sum(weights: Tensor, tensors: Tensor) -> Tensor:
    """Return the sum over r of weights_rc tensors_rci."""
    if tensors.numel() <= _SMALL or torch.compiler.is_compiling():
        return (weights.unsqueeze(2) * tensors).sum(0)
    shares, parts = weights.unsqueeze(2).unbind(), tensors.unbind()
    result = parts[0] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        result.addcmul_(part, share)
    return result
