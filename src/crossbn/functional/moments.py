"""Moments of a batch.

| paper | here | shape | equation |
|---|---|---|---|
| mu_t | `mean` | [C] | (1) |
| sigma_t^2 | `var` (biased) | [C] | (2) |
| nu_t | second moment, `var + mean**2`; never formed | [C] | (6) |
| m | `count`, positions per channel: batch times space | int | |
"""

import torch
from torch import Tensor


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` [N, C, ...] per channel, in at least float32.

    Example:
        >>> batch_moments(torch.tensor([[1.0], [3.0]]))
        (tensor([2.]), tensor([1.]))
    """
    dtype = accumulation_dtype(x.dtype)
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        dims = [0, *range(2, x.ndim)]
        var, mean = torch.var_mean(x.to(dtype), dims, correction=0)
        return mean, var
    # Twice as fast as var_mean on the CPU. The running statistics, left alone by momentum 0, are there
    # because without them the result has the type of a bfloat16 input.
    running = x.new_zeros(x.shape[1], dtype=dtype)
    mean, var = torch.batch_norm_update_stats(x, running, torch.ones_like(running), 0.0)
    return mean, var


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that statistics of `dtype` values are kept in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def join_moments(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Join the moments of several parts [P, C] of `count` [P] positions into those of the whole [C].

    `mean = sum(w * mean_p)`, `var = sum(w * var_p) + sum(w * (mean_p - mean)**2)`, w the part's share of
    the positions: a sum of non-negative terms, so nothing cancels.

    Example:
        >>> join_moments(torch.tensor([[1.0], [4.0]]), torch.zeros(2, 1), torch.tensor([2.0, 1.0]))
        (tensor([2.]), tensor([2.]))
    """
    share = (count / count.sum()).to(mean.dtype).unsqueeze(1)
    joint_mean = (share * mean).sum(0)
    return joint_mean, (share * (var + (mean - joint_mean).square())).sum(0)
