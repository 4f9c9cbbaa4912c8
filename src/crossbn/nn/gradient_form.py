"""Remembering gradients: for small weights, and for all positions."""

from __future__ import annotations

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.forms import Form, Influence, Observation, Recollection, Rings, Shapes, add_to, agree, total
from crossbn.nn.history import History, Row
from crossbn.nn.statistics import Drift

_SMALL = 2**17


class Gradients(Form):
    """Keeps the gradient of the mean, one patch, and that of the variance, of the weight's size."""

    def shapes(self, channels: int) -> Shapes:
        """Return what is kept of a step."""
        shapes: Shapes = {"mean_at": (channels,), "var_at": (channels,)}
        for i, term in enumerate(self.terms):
            size = term.geometry.patch_size
            shapes |= {f"{i}.mean_grad": (term.geometry.groups, size), f"{i}.var_grad": (channels, size)}
        return shapes

    def recollect(self, rings: Rings, weights: list[Tensor]) -> Recollection:
        """Return what the weights' change since has done to each remembered step."""
        rows = [rings[f"{i}.mean_grad"] for i in range(len(weights))]
        shift = total(list(map(C.project_means, rows, weights))).sub_(rings["mean_at"])
        slope = total([C.project_var(rings[f"{i}.var_grad"], weight) for i, weight in enumerate(weights)])
        return Recollection(Drift(shift, slope.sub_(rings["var_at"]), None), [each.unsqueeze(1) for each in rows], None)

    def jacobians(self, rings: Rings, recollection: Recollection, influence: Influence) -> tuple[C.Jacobian, ...]:
        """Return how the pooled statistics follow each term's weight."""
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
            samples = places, centred.mul_(2 / len(centred))
        row: Rings = {}
        for i, (call, weight) in enumerate(zip(seen.calls, seen.weights, strict=True)):
            if call is None or call.y is None:
                continue
            mean_grad = C.mean_grad(call.y, call.geometry, call.output_sizes)
            if samples is None:
                output = x if x.ndim == 2 else x.reshape(*x.shape[:2], *call.output_sizes)
                mean_patch = mean_grad if self.centres else None
                var_grad = C.var_grad(output, today.mean, call.y, weight, call.geometry, mean_patch)
            else:
                var_grad = C.spread(samples[1], self._patches(call, samples[0], mean_grad))
            if today.local is not None:
                mean_grad, var_grad = mean_grad * today.local, var_grad * today.local
            # As they will be read again, to the order of summation.
            mean_grad, var_grad = (history.rounded(each).contiguous() for each in (mean_grad, var_grad))
            row |= {f"{i}.mean_grad": mean_grad, f"{i}.var_grad": var_grad}
            add_to(row, "mean_at", C.project_means(mean_grad.unsqueeze(0), weight)[0])
            add_to(row, "var_at", C.project_var(var_grad.unsqueeze(0), weight)[0])
        return dict(row)

    def is_theirs(self, seen: Observation, row: Row, history: History) -> bool | Tensor:
        """Compare <mean_grad, W> with E[x - b], and <var_grad, W> with twice the variance of the same positions."""
        mean, var = seen.today.mean, seen.today.var
        mean_at, var_at = row["mean_at"], row["var_at"]
        assert isinstance(mean_at, Tensor)
        assert isinstance(var_at, Tensor)

        def magnitude() -> Tensor:
            return self._magnitude([self.mean_grad_in(row, i) for i in range(len(seen.weights))], seen)

        of_mean = agree(mean_at, mean if seen.bias is None else mean - seen.bias, var, magnitude, seen.x.dtype)
        expected = var if self.positions is None else self._samples(seen, history)[1].square_().mean(0)
        rounding = expected.sqrt()
        of_var = agree(var_at / 2, expected, expected.square(), lambda: rounding * magnitude(), seen.x.dtype)
        return of_mean & of_var


def _weighted_sum(weights: Tensor, tensors: Tensor) -> Tensor:
    """Return the sum over r of weights_rc tensors_rci."""
    if tensors.numel() <= _SMALL or torch.compiler.is_compiling():
        return (weights.unsqueeze(2) * tensors).sum(0)
    shares, parts = weights.unsqueeze(2).unbind(), tensors.unbind()
    result = parts[0] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        result.addcmul_(part, share)
    return result
