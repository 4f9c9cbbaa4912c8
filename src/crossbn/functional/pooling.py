"""Statistics of the window: today's batch and the remembered steps, each step with one vote.

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| mu-bar_t | `mean` | average of the steps' means | [C] | (10) |
| nu-bar_t | not formed | average of max(nu_s, mu_s^2) | [C] | (11) |
| sigma-bar_t^2 | `var` | average(relu(var_s)) + average((mean_s - mean)^2) | [C] | (11) |
| 1 / k | `share` | today's vote, one over the steps that count | [C] or [1] | |
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Pooled(NamedTuple):
    """Pooled statistics and how much each step has in them."""

    mean: Tensor
    """[C]."""
    var: Tensor
    """[C], biased, never negative."""
    share: Tensor
    """[C], or [1] if the same for all: today's weight in the averages."""
    weight: Tensor
    """[R, C], or [R, 1] if the same for all: the remembered steps' weights; 0 where absent or dropped."""
    valid: Tensor
    """[R, C]: where the compensated variance is not negative."""
    deviation: Tensor
    """[R, C]: of the remembered means from the pooled one."""


def pool(
    mean: Tensor,
    var: Tensor,
    past_mean: Tensor,
    past_var: Tensor,
    present: Tensor | None = None,
    invalid: str = "max",
) -> Pooled:
    """Pool today's moments [C] with the remembered ones [R, C] that are `present` [R].

    The paper's `max(nu_s, mean_s^2)` less `mean_s^2` is `relu(var_s)`, which gives the variance as a sum of
    non-negative terms: no two large second moments are ever subtracted.

    Args:
        mean: today's mean.
        var: today's biased variance.
        past_mean: compensated means.
        past_var: compensated variances, possibly negative.
        present: 1 for the steps that are remembered, 0 for empty places; None if there are none of those.
        invalid: "max" clips a negative variance to 0 (the paper); "drop" leaves that step out for that
            channel (its released code).

    Example:
        >>> today, past = torch.tensor([1.0]), torch.tensor([[3.0]])
        >>> pool(today, today, past, past)[:2]
        (tensor([2.]), tensor([3.]))
    """
    valid = past_var >= 0
    if present is None and invalid == "max":
        weight, share = equal_votes(len(past_mean), mean.dtype, mean.device)
    else:
        weight = mean.new_ones(len(past_mean), 1) if present is None else present.unsqueeze(1)
        if invalid == "drop":
            weight = weight * valid
        share = (1 + weight.sum(0)).reciprocal_()
        weight = weight * share
    # Relative to today's mean: large means that are nearly the same are subtracted before anything is rounded.
    past_difference = past_mean - mean
    difference = (weight * past_difference).sum(0)
    past_deviation = past_difference - difference
    spread = past_var.clamp_min(0).addcmul_(past_deviation, past_deviation)
    pooled_var = torch.addcmul((weight * spread).sum(0), share, torch.addcmul(var, difference, difference))
    return Pooled(mean + difference, pooled_var, share, weight, valid, past_deviation)


class Votes(NamedTuple):
    """How much each step counts in the averages, where that does not depend on the channel."""

    each: Tensor | None
    """[R]: the remembered steps', today's being 1; None if all are 1."""
    weight: Tensor
    """[R, 1]: the same over their sum with today's."""
    share: Tensor
    """[1]: today's, over the same."""


@functools.lru_cache(1024)
def votes_by_age(steps: int, slot: int, decay: float, dtype: torch.dtype, device: torch.device) -> Votes:
    """Return `decay` to the power of each step's age, in a ring where the next one goes to `slot`.

    Example:
        >>> votes_by_age(3, 1, 0.5, torch.float64, torch.device("cpu")).each
        tensor([0.5000, 0.1250, 0.2500], dtype=torch.float64)
    """
    if decay == 1:
        return Votes(None, *equal_votes(steps, dtype, device))
    with torch.inference_mode(False):  # they are kept, and used in training as well
        ages = (slot - 1 - torch.arange(steps, device=device)) % steps + 1
        each = torch.pow(decay, ages.to(dtype))
        share = (1 + each.sum()).reciprocal().reshape(1)
        return Votes(each, (each * share).unsqueeze(1), share)


@functools.lru_cache(256)
def equal_votes(steps: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the weight of each of the remembered steps [R, 1], and today's [1], where all count the same."""
    with torch.inference_mode(False):  # they are kept, and used in training as well
        share = torch.full((1,), 1 / (1 + steps), dtype=dtype, device=device)
        return share.expand(steps, 1), share
