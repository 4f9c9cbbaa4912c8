r"""Remembered steps on their way through the layers of today: what other statistics of the norms before would change.

A remembered step went through norms that pooled other batches, had other gamma and beta, and read weights that have
been trained since. Nothing of its images is left, but for each channel two numbers go a long way: mean and standard
deviation `(m, s)` as they were, and `(m', s')` as they would be today (docs/derivation.md, section 8).

| where | `(m, s)` or `(m', s')` |
|---|---|
| after a norm | gamma (mean_r - mean) / sigma + beta, abs(gamma) sqrt(var_r) / sigma, statistics of then or today |
| after an activation | mean and standard deviation of act(z), z normal with the ones before |
| after a sum | sums of means and of variances: the terms are taken to be independent |

In between a channel is taken to have changed by a map `y' = scale y + offset`, which pooling and padding leave alone.
An operator that reads it has had other patches: `scale patch + offset inside`, `inside` being how often a tap is not in
the padding. So what is remembered of patches is moved, and everything else follows: how moments change with the
weights, and the gradients through that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional.activations import Activation
from crossbn.functional.geometry import Geometry
from crossbn.functional.sensitivity import Sizes, mean_grad
from crossbn.functional.storage import Kept

_LARGEST_SCALE = 4.0
"""Of a channel, or its inverse: beyond, nothing is known."""
_SMALLEST = 1e-6
"""A standard deviation that is none."""
_NODES = 24


class Carried(NamedTuple):
    """Means and standard deviations of R remembered steps, [R, C] each: as they were, and as they would be today."""

    mean: Tensor
    std: Tensor
    new_mean: Tensor
    new_std: Tensor
    number: Tensor  # [R]: of the forward that each step was; 0 if it is not known

    def activated(self, activation: Activation) -> Carried:
        """Return what is carried on behind an activation."""
        then, now = moments_of(activation, self.mean, self.std), moments_of(activation, self.new_mean, self.new_std)
        return Carried(*then, *now, self.number)

    def plus(self, other: Carried) -> Carried:
        """Return what is carried on by a sum."""
        return Carried(
            self.mean + other.mean,
            torch.hypot(self.std, other.std),
            self.new_mean + other.new_mean,
            torch.hypot(self.new_std, other.new_std),
            torch.where(self.number == other.number, self.number, 0),
        )

    def map_at(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and offset [R, C] for steps of these numbers: 1 and 0 for those that are others."""
        scale = (self.new_std / self.std.clamp_min(_SMALLEST)).clamp(1 / _LARGEST_SCALE, _LARGEST_SCALE)
        scale = torch.where(self.std > _SMALLEST, scale, 1)
        offset = torch.addcmul(self.new_mean, scale, self.mean, value=-1)
        same = ((number == self.number) & (number > 0)).unsqueeze(1)
        return torch.where(same, scale, 1), torch.where(same, offset, 0)


def side_by_side(parts: Sequence[Carried]) -> Carried | None:
    """Return what is carried in runs of channels as one; None if they do not remember as many steps."""
    first, *others = parts
    if any(len(each.mean) != len(first.mean) for each in others):
        return None
    number = first.number
    for each in others:
        number = torch.where(number == each.number, number, 0)
    mean, std, new_mean, new_std = (torch.cat([part[i] for part in parts], 1) for i in range(4))
    return Carried(mean, std, new_mean, new_std, number)


def after_norm(
    past: tuple[Tensor, Tensor], mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of what a norm makes of steps with the moments `past`, [R, C] each.

    Example:
        >>> past = torch.tensor([[3.0]]), torch.tensor([[4.0]])
        >>> after_norm(past, torch.tensor([1.0]), torch.tensor([16.0]), None, None, 0.0)
        (tensor([[0.5000]]), tensor([[0.5000]]))
    """
    scale = (var + eps).rsqrt()
    scale = scale if gamma is None else scale * gamma
    shifted = (past[0] - mean) * scale
    return shifted if beta is None else shifted + beta, past[1].clamp_min(0).sqrt() * scale.abs()


def moments_of(activation: Activation, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of act(z), z being normal.

    Pieces that are straight have a closed form; anything else is smooth, and integrated.

    Example:
        >>> moments_of(Activation("Relu"), torch.zeros(1), torch.ones(1))
        (tensor([0.3989]), tensor([0.5838]))
    """
    std = std.clamp_min(_SMALLEST)
    pieces = _pieces(activation)
    first, second = _of_smooth(activation, mean, std) if pieces is None else _of_pieces(pieces, mean, std)
    return first, torch.addcmul(second, first, first, value=-1).clamp_min(_SMALLEST**2).sqrt()


_Piece = tuple[float, float, float, float]
"""From, to, slope and intercept."""


def _pieces(activation: Activation) -> tuple[_Piece, ...] | None:
    """Return the straight pieces that a function is made of; None for another one."""
    infinity, options = math.inf, activation.options
    if activation.kind == "Relu":
        return ((0.0, infinity, 1.0, 0.0),)
    if activation.kind == "LeakyRelu":
        return (-infinity, 0.0, float(options[0]), 0.0), (0.0, infinity, 1.0, 0.0)
    if activation.kind == "Hardtanh":
        low, high = float(options[0]), float(options[1])
        return (-infinity, low, 0.0, low), (low, high, 1.0, 0.0), (high, infinity, 0.0, high)
    if activation.kind == "Hardsigmoid":
        return (-3.0, 3.0, 1 / 6, 0.5), (3.0, infinity, 0.0, 1.0)
    return None


def _of_pieces(pieces: tuple[_Piece, ...], mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[act(z)] and E[act(z)^2], from the moments of a normal distribution that is cut off."""
    first = second = torch.zeros_like(mean)
    for low, high, slope, intercept in pieces:
        a, b = (low - mean) / std, (high - mean) / std
        density_a, density_b = ((-0.5 * each.square()).exp() / math.sqrt(2 * math.pi) for each in (a, b))
        mass = torch.special.ndtr(b) - torch.special.ndtr(a)
        of_first = density_a - density_b
        of_second = mass + _finite(a) * density_a - _finite(b) * density_b
        # The piece is `at + by u` of a standard normal u.
        at, by = slope * mean + intercept, slope * std
        first = first + at * mass + by * of_first
        second = second + at.square() * mass + 2 * at * by * of_first + by.square() * of_second
    return first, second


def _finite(bound: Tensor) -> Tensor:
    return torch.nan_to_num(bound, posinf=0.0, neginf=0.0)  # times a density of 0


def _of_smooth(activation: Activation, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = _quadrature(mean.dtype, mean.device)
    values = activation(mean.unsqueeze(-1) + std.unsqueeze(-1) * nodes)
    return values @ weights, values.square() @ weights


@functools.lru_cache(16)
def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss and Hermite for a standard normal distribution."""
    k = torch.arange(1, _NODES, dtype=torch.float64)
    off = torch.diag(k.sqrt(), 1)
    values, vectors = torch.linalg.eigh(off + off.mT)  # of the recurrence of the polynomials
    return values.to(device, dtype), vectors[0].square().to(device, dtype)


def move_inputs(kept: Kept, i: int, geometry: Geometry, inside: Tensor, scale: Tensor, offset: Tensor) -> Kept:
    """Return what is kept of steps as if the `i`-th operator had read `scale y + offset` [R, C_in].

    `inside` [groups, I] is how often each tap is not in the padding. Moments and what the weights of then made of a
    patch stay: the change is found as that by other weights is.
    """
    taps = geometry.taps
    by, add = (
        each.reshape(len(each), geometry.groups, -1).repeat_interleave(taps, 2) for each in (scale, offset)
    )  # [R, groups, I]
    moved = dict(kept)
    if (rows := kept.get(f"{i}.rows")) is not None:
        moved[f"{i}.rows"] = rows = rows * by.unsqueeze(1)
        rows[:, 0] += add * inside
    if (mean_patch := kept.get(f"{i}.mean_grad")) is not None:
        moved[f"{i}.mean_grad"] = mean_patch * by + add * inside
        var_grad = kept[f"{i}.var_grad"]
        moved[f"{i}.var_grad"] = var_grad * by.repeat_interleave(var_grad.shape[1] // geometry.groups, 1)
    return moved


@functools.lru_cache(1024)
def share_inside(
    geometry: Geometry, sizes: Sizes, output_sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return how often each tap of an operator reads its input, and not the padding, [groups, I]."""
    with torch.inference_mode(False):  # it is kept, and used in training as well
        ones = torch.ones(1, geometry.in_channels, *sizes, dtype=dtype, device=device)
        return mean_grad(ones, geometry, torch.Size(output_sizes))
