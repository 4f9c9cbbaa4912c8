"""Compiled twins of what a training step does on the CPU, see `compiled/`; none of them is needed.

| here | its twin |
|---|---|
| `moments` | `moments.batch_moments` |
| `step` | `moments`, `taylor`, `pooling`, the forward of `normalize`, `sensitivity` |
| `blend` | `normalize`'s backward |
| `add_gradient_` | `normalize.Jacobian.add_weight_gradient_` |
"""

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbn.functional.library import functions, structures

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


def take_over(mean: Tensor, var: Tensor, running: tuple[Tensor, Tensor, Tensor]) -> None:
    """Let running mean and variance be `mean` and `var`, and count a step, if they are finite."""
    addresses = (each.data_ptr() for each in (mean, var, *running))
    if functions[mean.dtype]["take_over"](mean.shape[0], *addresses):
        torch.autograd.graph.increment_version(running)


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


NOT_FINITE, DONE, NOT_REMEMBERED, NOT_THE_OPERATOR = range(4)
"""What a step came to, see `compiled/library.c`."""


Structure = ctypes.Structure


def site(**fields: Any) -> ctypes.Structure:
    """Return `struct site`: an operator at one size of its input and output (see `site.py`)."""
    return structures["site", None](**fields)


def structures_for(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return `struct batch` and `struct memory`, empty: a batch to be normalized, and what is remembered."""
    return structures["batch", dtype](), structures["memory", dtype]()


def extent(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return address, images, channels, positions of an image, and the stride of images."""
    return x.data_ptr(), *_extent(x)


def step(dtype: torch.dtype, batch: ctypes.Structure, memory: ctypes.Structure, site: ctypes.Structure) -> int:
    """Do a norm's training step; return what it came to."""
    references = ctypes.byref(batch), ctypes.byref(memory), ctypes.byref(site)
    outcome: int = functions[dtype]["step"](*references, torch.get_num_threads())
    return outcome


def add_gradient_(
    grad: Tensor,
    rows: Tensor,
    of_mean: Tensor,
    of_var: Tensor,
    rest: Tensor | None,
    grad_mean: Tensor,
    grad_var: Tensor,
) -> None:
    """Add dL/dW to `grad` [C, I], from a = dL/dmean and v = dL/dvar [C]; the others are those of a `Jacobian`."""
    steps, amount, groups, size = rows.shape
    channel_stride = of_mean.stride(1) if of_mean.shape[1] > 1 else 0
    scratch = torch.empty_like(of_var)
    functions[grad.dtype]["add_gradient"](
        *(steps, amount, of_var.shape[2], groups, size, rows.data_ptr(), of_var.data_ptr()),
        *(of_mean.data_ptr(), of_mean.stride(0), channel_stride, None if rest is None else rest.data_ptr()),
        *(grad_mean.data_ptr(), grad_var.data_ptr(), scratch.data_ptr(), grad.data_ptr()),
        torch.get_num_threads(),
    )
