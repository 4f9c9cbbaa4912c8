"""How much each remembered step weighs, from what the steps themselves say.

docs/derivation.md, section 6, derives it: a step of age a says today's truth with the noise of its batch, R over its
relative size n_a, and with the drift of earlier layers since, Q for each step. The best weights are those of a Kalman
filter from the oldest step to today's. R and Q are seen while training, in how much steps of each age differ from
today's: v(a) = 2 R + Q a.

| symbol | name | shape |
|---|---|---|
| v(a) | `variogram` | [R], by age from 1 on |
| R, Q | `noise`, `drift` | [] |
| B | `gradient_price` | |
| n_a | `count`, over its mean | [R], by age |
| w_a / w_0 | step weights | [R], by age |
"""

import torch
from torch import Tensor

GRADIENT_PRICE = 0.03
"""B: what it costs, in units of a channel's variance, to take statistics from steps that pass no gradient on to earlier
layers. Set by hand."""

AVERAGING_RATE = 0.01
"""Of the exponential average over steps."""

LARGEST_DIFFERENCE = 16.0
"""Of a channel, so that one that has gone wild does not speak for all others."""

SMALLEST_WEIGHT = 1e-30
"""Of a step that is there: nothing, but told from the weight of one that is not."""


def gradient_price(images: int) -> float:
    """Return B for a batch of so many images: 0 for one.

    What a batch's share of the statistics passes on takes the mean off its gradient. With one image that is all that
    the image says of a channel's mean: no gradient to pay for.
    """
    return GRADIENT_PRICE if images > 1 else 0.0


def squared_differences(mean: Tensor, var: Tensor, past_mean: Tensor, past_var: Tensor, pooled_var: Tensor) -> Tensor:
    """Return how much each remembered step [R, C] differs from today's [C], on the average over channels: [R].

    Example:
        >>> today, past = torch.tensor([1.0]), torch.tensor([[3.0]])
        >>> squared_differences(today, today, past, today.unsqueeze(0), torch.tensor([2.0]))
        tensor([2.])
    """
    of_means = (past_mean - mean).square()
    of_deviations = (past_var.clamp_min(0).sqrt() - var.sqrt()).square()
    unit = pooled_var.clamp_min(torch.finfo(pooled_var.dtype).tiny)
    ratio = ((of_means + of_deviations) / unit).clamp_max(LARGEST_DIFFERENCE)
    return ratio.nan_to_num(LARGEST_DIFFERENCE).mean(1)  # infinity over infinity is as far away as anything


def averaged(variogram: Tensor, differences: Tensor, steps: int | Tensor) -> Tensor:
    """Return the variogram with the differences of one more step in it, `steps` having been remembered before.

    The first differences of each age are averaged evenly; an age that there is no step of stays at 0, so that the first
    step of all hardly counts.
    """
    ages = torch.arange(1, 1 + len(variogram), device=variogram.device)
    seen = (steps - ages + 1).clamp_min(1).to(variogram.dtype)  # of each age, today's included
    rate = seen.reciprocal().clamp_min(AVERAGING_RATE)
    return torch.where(ages <= steps, torch.lerp(variogram, differences, rate), variogram)


def fit_line(variogram: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return noise and drift, R and Q, by least squares over the ages that are `present` (1, else 0); neither below 0.

    Example:
        >>> [float(x) for x in fit_line(torch.tensor([0.5, 0.75, 1.0]), torch.ones(3))]
        [0.125, 0.25]
    """
    ages = torch.arange(1, 1 + len(variogram), device=variogram.device, dtype=variogram.dtype)
    tiny = torch.finfo(variogram.dtype).tiny
    amount = present.sum().clamp_min(1)
    centre, height = (present * ages).sum() / amount, (present * variogram).sum() / amount
    away = present * (ages - centre)
    slope = (away * variogram).sum() / away.square().sum().clamp_min(tiny)
    through_zero = (present * ages * variogram).sum() / (present * ages.square()).sum().clamp_min(tiny)
    drift = torch.minimum(slope.clamp_min(0), through_zero)
    return ((height - drift * centre) / 2).clamp_min(0), drift


def best_weights(
    noise: Tensor, drift: Tensor, count: Tensor, today: float | Tensor, price: float = GRADIENT_PRICE
) -> Tensor:
    """Return the weights of the remembered steps by age [R], today's being 1, from how many positions each is of.

    A step that is absent has a count of 0, and no weight.

    Example:
        >>> best_weights(torch.tensor(1e9), torch.tensor(0.0), torch.tensor([4.0, 4.0, 2.0]), 4)
        tensor([1.0000, 1.0000, 0.5000])
    """
    noise = noise.clamp_min(torch.finfo(noise.dtype).tiny)
    usual = count.sum() / (count > 0).sum().clamp_min(1)
    relative = count / usual.clamp_min(1)
    worth, factors = torch.zeros_like(noise), []
    for age in reversed(range(len(count))):
        worth = worth + relative[age]
        step = drift + price if age == 0 else drift
        factors.append(noise / (noise + worth * step))
        worth = worth * factors[-1]
    if not factors:
        return count
    return count / today * torch.stack(factors[::-1]).cumprod(0).clamp_min(SMALLEST_WEIGHT)
