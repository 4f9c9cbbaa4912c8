"""How far remembered moments are from true ones, and why.

| name | formula | shape |
|---|---|---|
| `scale` | true variance of all batches together + eps: what the layer divides by, squared | [C] |
| error of a mean | average over channels of abs(mean - true mean) / sqrt(scale) | number |
| error of a variance | average over channels of abs(var - true var) / scale | number |
| `batch_noise` | average over channels of sqrt(B / (B - 1)) average of abs(var - average var) / scale | number |

The scale is of all batches because the variance of a single tiny one may be next to nothing. The noise is what
pooling is there to average out: statistics that are wrong by less are worth pooling. The root makes up for the
average being that of the same B batches.

The way from the statistics of an old batch, as they are pooled, to those that they stand for has three steps, each with
one cause:

| statistics of an old batch | what is left until the next |
|---|---|
| as they are remembered, moved to today's weights of the norm's operator | `OWN_WEIGHTS`: what the Taylor terms lack |
| of the operator's old input with today's weights (same layer) | `WEIGHTS_BEFORE`: earlier layers have trained since |
| of the old step done again with today's weights (whole network) | `NORMS_BEFORE`: norms pooled other batches then |
| of all remembered batches run together with today's weights | |

The last line is what pooling stands for: one large batch. `ALL` is the way from the first line to it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional import join_moments
from crossbn.lab.fidelity.records import ALL, CAUSES, CauseRecord, Fidelity
from crossbn.nn.segment import PastMoments


class Moments(NamedTuple):
    """True moments of B batches."""

    mean: Tensor
    """[B, C]."""
    var: Tensor
    """[B, C], biased."""
    positions: Tensor
    """[B]."""

    def scale(self, eps: float) -> Tensor:
        """Return the variance of all batches together, plus eps [C]."""
        return join_moments(*self)[1] + eps


class Pair(NamedTuple):
    """A mean and a variance, [C] each."""

    mean: Tensor
    var: Tensor

    def errors(self, true: "Pair", scale: Tensor) -> tuple[float, float]:
        """Return the errors of mean and variance."""
        mean = ((self.mean - true.mean).abs() / scale.sqrt()).mean()
        return float(mean), float(((self.var - true.var).abs() / scale).mean())


def batch_noise(var: Tensor, scale: Tensor) -> float | None:
    """Return how far the variances [B, C] of batches are from their average; None for one batch.

    Example:
        >>> batch_noise(torch.tensor([[1.0], [3.0]]), torch.tensor([2.0]))
        0.7071067690849304
    """
    batches = len(var)
    if batches < 2:
        return None
    deviation = (var - var.mean(0)).abs().mean(0) * (batches / (batches - 1)) ** 0.5
    return float((deviation / scale).mean())


def compare(past: PastMoments, age: int, truth: Moments, batch: int, eps: float) -> Fidelity:
    """Compare the moments remembered `age` steps ago with those of a batch.

    Args:
        past: remembered moments, the latest step first.
        age: which of them, from 1.
        truth: true moments of several batches.
        batch: which of them.
        eps: of the norm.

    Example:
        >>> past = PastMoments(*torch.tensor([[[0.0]], [[2.0]], [[1.0]], [[3.0]]]))
        >>> truth = Moments(torch.tensor([[1.0]]), torch.tensor([[4.0]]), torch.tensor([8.0]))
        >>> found = compare(past, 1, truth, 0, eps=0.0)
        >>> found.naive_mean_error, found.compensated_mean_error, found.explained_var
        (0.5, 0.0, 0.5)
    """
    scale, true, row = truth.scale(eps), Pair(truth.mean[batch], truth.var[batch]), age - 1
    naive_mean, naive_var = Pair(past.mean[row], past.var[row]).errors(true, scale)
    moved = past.compensated_var[row]
    compensated_mean, compensated_var = Pair(past.compensated_mean[row], moved.clamp_min(0)).errors(true, scale)
    noise, invalid = batch_noise(truth.var, scale), float((moved < 0).to(torch.float64).mean())
    return Fidelity(len(scale), naive_mean, compensated_mean, naive_var, compensated_var, noise, invalid)


def tell_causes(
    step: int, layer: str, age: int, stages: Sequence[Pair], together: Moments, eps: float
) -> list[CauseRecord]:
    """Return the distance of each stage of the table above from the next, and of the first from the last.

    Args:
        step: training steps before the measurement.
        layer: the norm.
        age: of the statistics.
        stages: the statistics of a batch, one of them for each line of the table.
        together: moments of all batches run together, whose variance is the scale.
        eps: of the norm.

    Example:
        >>> stages = [Pair(torch.tensor([mean]), torch.tensor([4.0])) for mean in (0.0, 1.0, 1.0, 3.0)]
        >>> together = Moments(torch.tensor([[3.0]]), torch.tensor([[4.0]]), torch.tensor([8.0]))
        >>> [(each.cause, each.mean_error) for each in tell_causes(9, "bn1", 1, stages, together, 0.0)]
        [('own weights', 0.5), ('weights before', 0.0), ('norms before', 1.0), ('all', 1.5)]
    """
    scale = together.scale(eps)
    ways = [*zip(CAUSES, pairwise(stages), strict=True), (ALL, (stages[0], stages[-1]))]
    return [
        CauseRecord(step, layer, age, cause, len(scale), *here.errors(there, scale)) for cause, (here, there) in ways
    ]
