"""What a checkpoint knows of its statistics, as a belief that moves with the weights and fades as the network drifts.

A network that was trained is fitted to its running statistics: with them it is the function that it was. Those of a few
new images are noise, and other images have others. So the running statistics are a belief (`prior="running"`), one more
component of the mixture that is pooled. At each step it moves as the latest remembered batch does when its layer's
weights go from that step's to today's: unlike a frozen norm it keeps its scale whatever the weights' scale becomes, and
gradients reach the weights through it as they do through the remembered steps. docs/derivation.md, section 8.

| symbol | name | formula | shape |
|---|---|---|---|
| m, s^2 | belief | m + shift, s^2 exp(growth) at each step | [C] |
| D | `drift_of` | mean of (sum of shift / s)^2 + (sum of growth / 2)^2 | [] |
| beta | `belief_weight` | V / (V + D), V the noise of the pooled statistics | [1] |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional.taylor import Dependence, Jacobian

LARGEST_GROWTH = 0.7
"""Of the logarithm of a variance at a step."""

LARGEST_RATIO = 4.0
"""Of the believed variance to that of the window, in gradients: channels that are silent in a few images would have
any."""


_LEAST_PAST = 0.01
_NO_NOISE = 1e-30
"""That is 0, as far as noise is concerned: too few steps to see any."""


class Latest(NamedTuple):
    """What the latest remembered step has moved by since it was remembered, and what steps say of their noise."""

    shift: Tensor  # [C], of the mean
    growth: Tensor  # [C], of the logarithm of the variance
    noise: Tensor | float  # R of weighting.py


def growth_of(slope: Tensor, var: Tensor) -> Tensor:
    """Return the growth of the logarithm of a variance by its slope, 0 where there is none, within bounds.

    A logarithm is at home with a scale: weights that become 1 + e times as large are 2 e, whatever the mean is.

    Example:
        >>> growth_of(torch.tensor([0.2, 1.0, 5.0]), torch.tensor([2.0, 0.0, 1.0]))
        tensor([0.1000, 0.0000, 0.7000])
    """
    growth = torch.where(var > 0, slope / var, torch.zeros_like(var))
    return growth.clamp(-LARGEST_GROWTH, LARGEST_GROWTH)


def travelled(way: Tensor, shift: Tensor, growth: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return the way [2, C] that a belief has gone since the checkpoint, one step further.

    Of the mean in standard deviations, of the standard deviation in logarithms: back and forth is no way.
    """
    return way + torch.stack([shift * (var + eps).rsqrt(), growth / 2])


def drift_of(way: Tensor) -> Tensor:
    """Return D, []."""
    return way.square().sum(0).mean()


def belief_weight(drift: Tensor, noise: Tensor | float, share: Tensor) -> Tensor:
    """Return how much the belief weighs in the mixture, [1].

    It is off by as much as the network has drifted: what is not known of the layers before is taken to be as large as
    what is known of the own one. The pooled statistics are off by the noise of a step over the number of steps, which
    is times today's `share` if all weigh alike. As long as noise has not been seen, and as long as no weight has moved,
    there is the belief alone.

    Example:
        >>> belief_weight(torch.tensor(0.02), 0.08, torch.tensor([0.25]))
        tensor([0.5000])
    """
    pooled = noise * share
    is_known = (drift > 0) & (pooled > _NO_NOISE)
    return torch.where(is_known, pooled / (pooled + drift), torch.ones_like(pooled))


def blend(
    mean: Tensor, var: Tensor, share: Tensor, dependence: Dependence | None, belief: tuple[Tensor, Tensor], beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Dependence | None]:
    """Return mean, variance [C], today's share and the dependence of the mixture of pooled statistics and a belief.

    The belief follows the weights as the remembered steps do on the average: its mean by as much, its variance in
    proportion.
    """
    off = mean - belief[0]
    new_mean = mean - beta * off
    new_var = (1 - beta) * torch.addcmul(var, off, off * beta) + beta * belief[1]
    if dependence is None:
        return new_mean, new_var, (1 - beta) * share, None
    past = (1 - share).clamp_min(_LEAST_PAST)  # where hardly anything is remembered, there is hardly anything to follow
    by_mean = (1 - beta) + beta / past
    proportion = (belief[1] / var.clamp_min(torch.finfo(var.dtype).tiny)).clamp_max(LARGEST_RATIO)
    by_var = (1 - beta) + beta / past * proportion
    between = -2 * beta * (1 - beta) * share / past * off
    jacobians = []
    for rows, of_mean, of_var, rest in dependence.jacobians:
        scaled = of_var * by_var
        scaled[:, 0] += of_mean * between
        rest = None if rest is None else rest * by_var.unsqueeze(1)
        jacobians.append(Jacobian(rows, of_mean * by_mean, scaled, rest))
    of_bias = dependence.of_bias
    if of_bias is not None:  # a bias is what it is for a frozen norm: the belief does not follow it
        of_bias = (1 - beta) * of_bias[0], (1 - beta) * (of_bias[1] + 2 * beta * off * of_bias[0])
    new = dependence._replace(jacobians=tuple(jacobians), dvar_dvar=dependence.dvar_dvar * by_var, of_bias=of_bias)
    return new_mean, new_var, (1 - beta) * share, new
