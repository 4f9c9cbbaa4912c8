"""Statistics of the window: today's batch and the remembered steps, each step with its weight.

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| mu-bar_t | `mean` | average of the steps' means | [C] | (10) |
| nu-bar_t | not formed | average of max(nu_s, mu_s^2) | [C] | (11) |
| sigma-bar_t^2 | `var` | average(relu(var_s)) + average((mean_s - mean)^2) | [C] | (11) |
| 1 / k | `share` | today's weight over the sum of all | [C] or [1] | |

A network that was trained is fitted to its running statistics: with them it is the function that it was. Those of a
few new images are noise, and other images have others. So with `prior="running"` the running statistics are a belief,
one more component of the mixture. At each step it moves as the latest remembered batch does when its layer's weights go
from that step's to today's: unlike a frozen norm it keeps its scale whatever the weights' scale becomes, and gradients
reach the weights through it as they do through the remembered steps. docs/derivation.md, section 8.

| symbol | name | formula | shape |
|---|---|---|---|
| m, s^2 | belief | m + shift, s^2 exp(growth) at each step | [C] |
| D | `drifted` | sum over steps of the channels' mean of (shift / s)^2 + (growth / 2)^2 | [] |
| beta | `belief_weight` | V / (V + D), V the noise of the pooled statistics | [1] |
"""

import functools
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
"""Of the weights of remembered steps together, to follow them."""

_NO_NOISE = 1e-30
"""That is 0, as far as noise is concerned: too few steps to see any."""


class Pooled(NamedTuple):
    """Pooled statistics and how much each step has in them."""

    mean: Tensor  # [C]
    var: Tensor  # [C], biased, never negative
    share: Tensor  # [C] or [1]: today's weight in the averages
    weight: Tensor  # [R, C] or [R, 1]: the remembered steps' weights, d mean / d past_mean; 0 where absent
    dvar_dvar: Tensor  # [R, C]: d var / d past_var
    dvar_dmean: Tensor  # [R, C]: d var / d past_mean


def pool(
    mean: Tensor, var: Tensor, past_mean: Tensor, past_var: Tensor, relative: Tensor | None = None, invalid: str = "max"
) -> Pooled:
    """Pool today's moments [C] with the compensated ones of remembered steps [R, C], whose variance may be negative.

    The paper's `max(nu_s, mean_s^2)` less `mean_s^2` is `relu(var_s)`: the variance is a sum of non-negative terms, and
    no two large second moments are ever subtracted. Where that clips a variance, invalid="drop" (the paper's released
    code) leaves the step out instead, for that channel. `relative` [R] are the steps' weights, today's being 1, and
    0 for places without a step; None if all are 1.

    Example:
        >>> today, past = torch.tensor([1.0]), torch.tensor([[3.0]])
        >>> pool(today, today, past, past)[:2]
        (tensor([2.]), tensor([3.]))
    """
    valid = past_var >= 0
    if relative is None and invalid == "max":
        _, weight, share = weights_by_age(len(past_mean), 0, 1.0, mean.dtype, mean.device)
    else:
        weight = mean.new_ones(len(past_mean), 1) if relative is None else relative.unsqueeze(1)
        weight = weight * valid if invalid == "drop" else weight
        share = (1 + weight.sum(0)).reciprocal_()
        weight = weight * share
    # Relative to today's mean: large means that are nearly the same are subtracted before anything is rounded.
    past_difference = past_mean - mean
    difference = (weight * past_difference).sum(0)
    past_deviation = past_difference - difference
    spread = past_var.clamp_min(0).addcmul_(past_deviation, past_deviation)
    pooled_var = torch.addcmul((weight * spread).sum(0), share, torch.addcmul(var, difference, difference))
    dvar_dmean = (weight * past_deviation).mul_(2)
    return Pooled(mean + difference, pooled_var, share, weight, weight * valid, dvar_dmean)


class StepWeights(NamedTuple):
    """How much each step counts in the averages, where that does not depend on the channel."""

    relative: Tensor | None  # [R]: the remembered steps', today's being 1; None if all are 1
    weight: Tensor  # [R, 1]: the same over their sum with today's
    share: Tensor  # [1]: today's, over the same


@functools.lru_cache(1024)
def weights_by_age(steps: int, slot: int, decay: float, dtype: torch.dtype, device: torch.device) -> StepWeights:
    """Return `decay` to the power of each step's age, in a ring where the next one goes to `slot`."""
    with torch.inference_mode(False):  # they are kept, and used in training as well
        relative = torch.pow(decay, ages(steps, slot, device).to(dtype))
        share = (1 + relative.sum()).reciprocal().reshape(1)
        return StepWeights(None if decay == 1 else relative, (relative * share).unsqueeze(1), share)


def ages(steps: int, slot: int | Tensor, device: torch.device) -> Tensor:
    """Return how many steps ago each of the remembered ones was, [R], in a ring where the next one goes to `slot`."""
    return (slot - 1 - torch.arange(steps, device=device)) % max(steps, 1) + 1


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


def drifted(drift: Tensor, shift: Tensor, growth: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return D, [], one step further: squares add up, as they do for something that wanders.

    Of the mean in standard deviations, of the standard deviation in logarithms.

    Example:
        >>> one = torch.ones(2)
        >>> drifted(torch.tensor(0.5), shift=0.2 * one, growth=0.6 * one, var=4 * one, eps=0.0)
        tensor(0.6000)
    """
    return drift + (shift.square() / (var + eps) + growth.square() / 4).mean()


def belief_weight(drift: Tensor, noise: Tensor | float, share: Tensor) -> Tensor:
    """Return how much the belief weighs in the mixture, [1].

    It is off by as much as the network has drifted: what is not known of the layers before is taken to wander as much
    as what is known of the own one. The pooled statistics are off by the noise of a step over the number of steps,
    which is times today's `share` if all weigh alike. As long as noise has not been seen, and as long as no weight has
    moved, there is the belief alone.

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
