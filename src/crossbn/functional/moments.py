"""Moments of a batch.

| paper | here | shape | equation |
|---|---|---|---|
| mu_t | `mean` | [C] | (1) |
| sigma_t^2 | `var` (biased) | [C] | (2) |
| nu_t | second moment, `var + mean**2`; never formed | [C] | (6) |
| m | `count`, positions per channel: batch times space | int | |
"""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from crossbn.torch_internals import inside_functorch

Flag = bool | Tensor
"""A bool where the value may be looked at, on the CPU; a scalar tensor on a GPU, which is never waited for."""

_LARGE = 2**16
_WIDE = (torch.float32, torch.float64)


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` [N, C, ...] per channel, in at least float32.

    They are differentiable, backwards and forwards, and computed fastest for an `x` without a graph.

    Example:
        >>> batch_moments(torch.tensor([[1.0], [3.0]]))
        (tensor([2.]), tensor([1.]))
    """
    dtype, dims = accumulation_dtype(x.dtype), [0, *range(2, x.ndim)]
    if torch.compiler.is_compiling() or is_differentiated(x) or not (x.is_cpu or native_available(x)):
        var, mean = torch.var_mean(x.to(dtype), dims, correction=0)
        return mean, var
    if native_available(x):  # one kernel, for any type and layout
        found: tuple[Tensor, Tensor] = torch.batch_norm_update_stats(x, None, None, 0.0)
        return found
    if x.numel() >= _LARGE:  # on the CPU two plain passes are four times as fast as the native kernel, ten as var_mean
        mean = x.mean(dims, dtype=dtype)
        return mean, (x - channelwise(mean, x)).square_().mean(dims)
    # Without running statistics the result would have the type of a bfloat16 input; momentum 0 leaves them alone.
    running = None if x.dtype == dtype else x.new_ones(x.shape[1], dtype=dtype)
    mean, var = torch.batch_norm_update_stats(x, running, running, 0.0)
    return mean, var


def is_differentiated(x: Tensor) -> bool:
    """Tell whether a derivative may be taken of what is made of `x`, by autograd or by a transform."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return inside_functorch() or forward_ad.unpack_dual(x).tangent is not None


def native_available(x: Tensor) -> bool:
    """Tell whether SyncBatchNorm's native kernels are there for a tensor like `x`."""
    return x.is_cuda and not torch.compiler.is_compiling()


def channelwise(values: Tensor, x: Tensor) -> Tensor:
    """Shape per-channel values [C] to go with `x` [N, C, ...]."""
    return values.reshape(-1, *[1] * (x.ndim - 2))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that statistics of `dtype` values are kept in: float32 or wider."""
    return dtype if dtype in _WIDE else torch.promote_types(dtype, torch.float32)


def all_finite(*values: Tensor) -> Flag:
    """Tell whether all values are finite."""
    if all(value.is_cpu for value in values) and not torch.compiler.is_compiling():
        # The sum is quicker; that of large numbers may be infinite though none of them is.
        return all(math.isfinite(value.sum()) or bool(value.isfinite().all()) for value in values)
    # Fewer kernels than isfinite has; the largest is not a number if one is not.
    return (values[0] if len(values) == 1 else torch.cat(values)).abs().amax() < torch.inf


def join_moments(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Join the moments of several parts [P, C] of `count` [P] positions into those of the whole [C].

    The variance is a sum of terms that are not negative, so nothing cancels.
    """
    share = (count / count.sum()).to(mean.dtype).unsqueeze(1)
    joint_mean = (share * mean).sum(0)
    return joint_mean, (share * (var + (mean - joint_mean).square())).sum(0)
