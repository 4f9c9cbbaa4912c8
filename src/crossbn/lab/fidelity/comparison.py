"""How far remembered moments are from true ones.

| name | formula | shape |
|---|---|---|
| `scale` | true variance of all batches together + eps: what the layer divides by, squared | [C] |
| error of a mean | average over channels of abs(mean - true mean) / sqrt(scale) | number |
| error of a variance | average over channels of abs(var - true var) / scale | number |
| `batch_noise` | average over channels of sqrt(B / (B - 1)) average of abs(var - average var) / scale | number |

The scale is of all batches because the variance of a single tiny one may be next to nothing. The noise is what
pooling is there to average out: statistics that are wrong by less are worth pooling. The root makes up for the
average being that of the same B batches.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional import join_moments
from crossbn.lab.fidelity.fidelity_records import Fidelity
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
    scale = truth.scale(eps)
    true_mean, true_var = truth.mean[batch], truth.var[batch]

    def mean_error(mean: Tensor) -> float:
        return float(((mean - true_mean).abs() / scale.sqrt()).mean())

    def var_error(var: Tensor) -> float:
        return float(((var - true_var).abs() / scale).mean())

    row = age - 1
    return Fidelity(
        len(true_mean),
        mean_error(past.mean[row]),
        mean_error(past.compensated_mean[row]),
        var_error(past.var[row]),
        var_error(past.compensated_var[row].clamp_min(0)),
        batch_noise(truth.var, scale),
        float((past.compensated_var[row] < 0).to(torch.float64).mean()),
    )
