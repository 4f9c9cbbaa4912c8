"""The filter of Kalman Normalization.

Guangrun Wang, Jiefeng Peng, Ping Luo, Xinjiang Wang, Liang Lin, "Kalman Normalization: Normalizing Internal
Representations Across Network Layers", NeurIPS 2018; first as "Batch Kalman Normalization",
https://arxiv.org/abs/1802.03133.

The distribution of a layer's features is estimated twice: predicted from the estimate of the layer before, and observed
in the batch. A gain blends the two, and the blend is both what normalizes and what the next layer predicts from.

| paper | here | shape |
|---|---|---|
| A^k | the operator between the layers, after a rectifier | |
| mu^(k-1), Sigma^(k-1) | the preceding norm's estimate; covariances are diagonal | [C_in] |
| mu^(k given k-1), Sigma^(k given k-1) | `predict`: `A mu`, `A Sigma A^T` | [C] |
| z, S | `observe`: mean and variance of the batch | [C] |
| q^k | `gain`, the weight of the batch | scalar |
| mu^k, Sigma^k | `correct`: `(1 - q) mu + q z`; `(1 - q) Sigma + q S + q (1 - q) (z - mu)^2` | [C] |

The paper's filter has any transition A, noise and gain; these here are of the authors' code. It runs Gaussian samples
of the preceding estimate, independent from place to place and channel to channel, through a rectifier and the network's
own convolution and takes their moments, without noise and with a fixed gain, 0.1 for micro-batches and 0.95 for large
ones. What is handed on is the distribution before normalization. Differences from that code:

- The moments are the expectations of the sampled ones, in closed form: nothing is random. They are not the same at the
  border of a padded map.
- A prediction whose variance, averaged over channels, is 100 times the batch's or more is not believed. The code
  averages the channels' quotients, so that one channel whose few values agree throws a tiny batch back on its own
  statistics.
- A norm has one predecessor; the code adds up the estimates of the branches of a residual block.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crossbn.functional import accumulation_dtype, flatten_weight, geometry_of

TOO_FAR = 100.0
"""Predicted over observed variance, from which on a prediction is not believed."""


class Estimate(NamedTuple):
    """Mean and variance [C] of a layer's features, with a graph."""

    mean: Tensor
    var: Tensor


def observe(x: Tensor) -> Estimate:
    """Return mean and biased variance of the batch `x` [N, C, ...], with a graph, in at least float32."""
    var, mean = torch.var_mean(x.to(accumulation_dtype(x.dtype)), [0, *range(2, x.ndim)], correction=0)
    return Estimate(mean, var)


def rectified(estimate: Estimate) -> Estimate:
    """Return the moments of `max(x, 0)` for Gaussian x.

    Example:
        >>> rectified(Estimate(torch.zeros(1), torch.ones(1))).mean * (2 * torch.pi) ** 0.5
        tensor([1.])
    """
    mean, var = estimate.mean, estimate.var.clamp(min=torch.finfo(estimate.var.dtype).tiny)
    std = var.sqrt()
    ratio = mean / std
    below = torch.special.ndtr(ratio)
    density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
    first = mean * below + std * density
    second = (mean.square() + var) * below + mean * std * density
    return Estimate(first, (second - first.square()).clamp(min=0))


def predict(estimate: Estimate, producer: nn.Module) -> Estimate:
    """Return the moments [C] that a convolution or linear layer makes of independent rectified features [C_in]."""
    geometry = geometry_of(producer)
    inputs = rectified(estimate)
    weight: Tensor = producer.weight  # type: ignore[assignment]  # Module attributes are untyped
    rows = flatten_weight(weight, geometry).to(inputs.mean.dtype)
    taps = rows.unflatten(0, (geometry.groups, -1)).unflatten(2, (-1, geometry.taps))
    mean, var = (values.unflatten(0, (geometry.groups, -1)).unsqueeze(2) for values in inputs)
    predicted = Estimate((taps.sum(3) @ mean).flatten(), (taps.square().sum(3) @ var).flatten())
    bias = producer.bias
    return predicted._replace(mean=predicted.mean + bias) if isinstance(bias, Tensor) else predicted


def correct(predicted: Estimate, observed: Estimate, gain: float) -> Estimate:
    """Blend prediction and observation as the mixture of both distributions; see the table above."""
    mean = torch.lerp(predicted.mean, observed.mean, gain)
    shift = gain * (1 - gain) * (observed.mean - predicted.mean).square()
    blend = Estimate(mean, torch.lerp(predicted.var, observed.var, gain) + shift)
    believed = predicted.var.mean() < TOO_FAR * observed.var.mean()
    return Estimate(*(torch.where(believed, new, old) for new, old in zip(blend, observed, strict=True)))
