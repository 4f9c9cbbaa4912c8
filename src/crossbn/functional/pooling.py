"""Statistics of the window: today's batch and the remembered steps, each step with its weight.

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| mu-bar_t | `mean` | average of the steps' means | [C] | (10) |
| nu-bar_t | not formed | average of max(nu_s, mu_s^2) | [C] | (11) |
| sigma-bar_t^2 | `var` | average(relu(var_s)) + average((mean_s - mean)^2) | [C] | (11) |
| 1 / k | `share` | today's weight over the sum of all | [C] or [1] | |
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


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
