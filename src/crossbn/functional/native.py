"""Compiled twins of what a training step does on the CPU, `native.c`; none of them is needed.

| here | its twin |
|---|---|
| `moments` | `moments.batch_moments` |
| `remember_samples`, `remember_gradients` | `sensitivity` |
| `pool_samples`, `pool_gradients` | `taylor.project` and `compensate`, `pooling.pool` |
| `blend` | `normalize`'s backward |
| `coefficients`, `add_gradient_` | `normalize.Jacobian.add_weight_gradient_` |
"""

import ctypes
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional.library import NUMBER, POINTER, REAL, functions
from crossbn.functional.pooling import Votes

MOST_STEPS = 63
"""Remembered steps that can be pooled."""


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` [N, C, ...] per channel."""
    mean = x.new_empty(x.shape[1])
    var = torch.empty_like(mean)
    functions[x.dtype]["moments"](x.data_ptr(), *_extent(x), mean.data_ptr(), var.data_ptr(), torch.get_num_threads())
    return mean, var


def _extent(x: Tensor) -> tuple[int, int, int, int]:
    """Return images, channels, positions of an image, and the stride of images."""
    batch, channels, *space = x.shape
    return batch, channels, math.prod(space), x.stride(0)


def all_finite(x: Tensor) -> bool:
    """Tell whether all numbers of a dense tensor are finite."""
    return bool(functions[x.dtype]["all_finite"](x.data_ptr(), x.numel()))


def move_running(
    mean: Tensor, var: Tensor, bessel: float, momentum: float, running_mean: Tensor, running_var: Tensor
) -> None:
    """Move running statistics towards `mean` and `bessel * var`."""
    functions[mean.dtype]["move_running"](
        *(mean.shape[0], mean.data_ptr(), var.data_ptr(), bessel, momentum),
        *(running_mean.data_ptr(), running_var.data_ptr()),
    )
    torch.autograd.graph.increment_version((running_mean, running_var))


class Blended(NamedTuple):
    """Gradients of what goes into `normalize`."""

    x: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor


def blend(grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float, share: Tensor, gamma: Tensor) -> Blended:
    """Return the gradients, from that of the output."""
    grad, x = grad.contiguous(), x.contiguous()
    result = torch.empty_like(x), *(torch.empty_like(gamma) for _ in range(4))
    functions[x.dtype]["blend"](
        *(grad.data_ptr(), x.data_ptr(), *_extent(x)[:3], mean.data_ptr(), var.data_ptr(), eps),
        *(share.data_ptr(), int(share.numel() > 1), gamma.data_ptr()),
        *(each.data_ptr() for each in result),
        torch.get_num_threads(),
    )
    return Blended(*result)


class Site(ctypes.Structure):
    """`struct site`: an operator at one size of its input and output (see `site.py`)."""

    _fields_ = (
        *((name, NUMBER) for name in ("images", "channels", "space", "in_channels")),
        ("sizes", NUMBER * 3),
        ("groups", NUMBER),
        ("taps", NUMBER * 3),
        ("often", POINTER * 3),
        *((name, NUMBER) for name in ("amount", "jump")),
        *((name, POINTER) for name in ("tap", "inside")),
    )


class Step(NamedTuple):
    """A training step to be remembered."""

    x: Tensor
    """What the operator made, [N, C, ...]."""
    y: Tensor
    """What it read, [N, C_in, ...]."""
    mean: Tensor
    var: Tensor
    start: int
    """Which position to look at first."""
    scratch: Tensor


def remember_samples(site: Site, step: Step, slot: Mapping[str, Tensor]) -> bool:
    """Write the step to its place in the history; nothing, and return False, if the input is not finite."""
    rows, products, centred = slot["0.rows"], slot["products"], slot["centred"]
    written = functions[step.x.dtype]["remember_samples"](
        *(ctypes.byref(site), *_addresses(step), rows.shape[0] - 1, *_kept(slot)),
        *(rows.data_ptr(), products.data_ptr(), centred.data_ptr(), torch.get_num_threads()),
    )
    return bool(written)


def remember_gradients(site: Site, step: Step, slot: Mapping[str, Tensor]) -> bool:
    """Write the step to its place in the history; nothing, and return False, if the input is not finite."""
    mean_grad, var_grad = slot["0.mean_grad"], slot["0.var_grad"]
    centred = step.x.new_empty(site.amount, site.channels)
    scaled, patches = torch.empty_like(centred), step.x.new_empty(site.amount, mean_grad.numel())
    written = functions[step.x.dtype]["remember_gradients"](
        *(ctypes.byref(site), *_addresses(step), *_kept(slot)),
        *(mean_grad.data_ptr(), slot["mean_at"].data_ptr(), var_grad.data_ptr(), slot["var_at"].data_ptr()),
        *(centred.data_ptr(), scaled.data_ptr(), patches.data_ptr(), torch.get_num_threads()),
    )
    if written and site.groups == 1:
        torch.mm(scaled.mT, patches, out=var_grad)
    return bool(written)


def _addresses(step: Step) -> tuple[int, ...]:
    x, y, mean, var, start, scratch = step
    arrays = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), mean.data_ptr(), var.data_ptr(), scratch.data_ptr()
    return start, *arrays


def _kept(slot: Mapping[str, Tensor]) -> tuple[int, ...]:
    return slot["mean"].data_ptr(), slot["var"].data_ptr(), slot["count"].data_ptr()


class _Batch(ctypes.Structure):
    _fields_ = (
        ("x", POINTER),
        *((name, NUMBER) for name in ("images", "channels", "space", "x_stride")),
        *((name, POINTER) for name in ("today_mean", "today_var", "mean", "var", "gamma", "beta")),
        ("eps", REAL),
        ("votes", POINTER),
        ("y", POINTER),
    )


class Batch:
    """A batch to be pooled with remembered steps and, if `normalize` is asked for, normalized with the result.

    Args:
        x: input [N, C, ...].
        moments: its mean and biased variance, if they are known already.
        votes: of the remembered steps.
        normalize: gamma, beta and eps; None if that is done elsewhere. Moments must not be known then.
    """

    def __init__(
        self,
        x: Tensor,
        moments: tuple[Tensor, Tensor] | None,
        votes: Votes,
        normalize: tuple[Tensor | None, Tensor | None, float] | None = None,
    ) -> None:
        known, self.votes = moments is not None, votes
        self.today_mean, self.today_var = moments or (x.new_empty(x.shape[1]), x.new_empty(x.shape[1]))
        self.mean, self.var = torch.empty_like(self.today_mean), torch.empty_like(self.today_mean)
        self.y = None if normalize is None else torch.empty(x.shape, dtype=x.dtype)
        gamma, beta, eps = normalize or (None, None, 0.0)
        self.structure = _Batch(
            *(None if known else x.data_ptr(), *_extent(x)),
            *(self.today_mean.data_ptr(), self.today_var.data_ptr(), self.mean.data_ptr(), self.var.data_ptr()),
            *(None if each is None else each.data_ptr() for each in (gamma, beta)),
            *(eps, None if votes.each is None else votes.each.data_ptr()),
            None if self.y is None else self.y.data_ptr(),
        )


def pool_samples(
    batch: Batch, past_mean: Tensor, past_var: Tensor, product: Tensor, at: Tensor, centred: Tensor
) -> bool:
    """Pool, and turn `product` into the coefficients of the rows in d var / dW; return whether the batch is finite.

    Args:
        batch: today's.
        past_mean: as they were, [R, C].
        past_var: as they were, [R, C].
        product: <row, W> at today's weights, [R, M, C]; the first row of a step is the mean patch.
        at: the same as it was.
        centred: 2 (x - mean) / P at the rows' positions.
    """
    finite = functions[at.dtype]["pool_samples"](
        *(ctypes.byref(batch.structure), *at.shape[:2], past_mean.data_ptr(), past_var.data_ptr()),
        *(product.data_ptr(), at.data_ptr(), centred.data_ptr(), torch.get_num_threads()),
    )
    return bool(finite)


class Gradients(NamedTuple):
    """What is remembered of R steps: gradients of mean and variance, and their products with the weights then."""

    mean_grad: Tensor
    """[R, groups, I]."""
    var_grad: Tensor
    """[R, C, I]."""
    mean_at: Tensor
    var_at: Tensor


def pool_gradients(
    batch: Batch, past_mean: Tensor, past_var: Tensor, weight: Tensor, gradients: Gradients
) -> tuple[bool, Tensor, Tensor]:
    """Pool; return whether the batch is finite, and of d var / dW the mean patches' coefficients [R, C], and the rest.

    Args:
        batch: today's.
        past_mean: as they were, [R, C].
        past_var: as they were, [R, C].
        weight: today's, [C, I].
        gradients: the remembered ones.
    """
    towards, rest = torch.empty_like(past_mean), torch.empty_like(weight)
    finite = functions[weight.dtype]["pool_gradients"](
        *(ctypes.byref(batch.structure), *gradients.mean_grad.shape, weight.data_ptr()),
        *(past_mean.data_ptr(), past_var.data_ptr(), *(each.data_ptr() for each in gradients)),
        *(towards.data_ptr(), rest.data_ptr(), torch.get_num_threads()),
    )
    return bool(finite), towards, rest


def coefficients(of_mean: Tensor, of_var: Tensor, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
    """Return those of the rows in dL/dW [R, M, C]; `of_mean` [R, C] or [R, 1] is of each step's first row only."""
    result = torch.empty_like(of_var)
    channel_stride = of_mean.stride(1) if of_mean.shape[1] > 1 else 0
    functions[of_var.dtype]["coefficients"](
        *(*of_var.shape, of_var.data_ptr(), of_mean.data_ptr(), of_mean.stride(0), channel_stride),
        *(grad_mean.data_ptr(), grad_var.data_ptr(), result.data_ptr()),
    )
    return result


def add_gradient_(grad: Tensor, rows: Tensor, coefficient: Tensor, rest: Tensor, grad_var: Tensor) -> None:
    """Add the rows [R, 1, groups, I] times their coefficients [R, 1, C], and `rest` times dL/dvar, to `grad` [C, I]."""
    steps, _, groups, size = rows.shape
    functions[grad.dtype]["add_gradient"](
        *(steps, grad.shape[0], groups, size, rows.data_ptr(), coefficient.data_ptr(), rest.data_ptr()),
        *(grad_var.data_ptr(), grad.data_ptr(), torch.get_num_threads()),
    )
