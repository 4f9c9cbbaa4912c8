"""The two halves of BatchNorm's backward, so that something can be done to the sums in between.

    reduce:  sum_grad = sum(g), sum_product = sum(g * (x - mean)), over batch and space
    blend:   dx = gamma * invstd * (g - (sum_grad + (x - mean) * invstd^2 * sum_product) / count)

SyncBatchNorm has both as native kernels on the GPU; elsewhere, and in a compiled step, they are written out.
Multiplying the sums by today's share is the "count trick" (passing k times the count) with a count per channel.
"""

import torch
from torch import Tensor


def native_available(x: Tensor) -> bool:
    """Tell whether torch has native kernels for the halves, for a tensor like `x`."""
    return x.is_cuda and not torch.compiler.is_compiling()


def reduce_gradient(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `sum_grad` and `sum_product` [C], in the type of `mean`."""
    if native_available(x):
        sums = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, False, False)
        return sums[0], sums[1]
    dims = [0, *range(2, x.ndim)]
    grad = grad.to(mean.dtype)
    return grad.sum(dims), (grad * (x.to(mean.dtype) - channelwise(mean, x))).sum(dims)


def blend_gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_grad: Tensor,
    sum_product: Tensor,
    count: Tensor,
) -> Tensor:
    """Return dx in the type of `x`, from sums over `count` positions, a scalar."""
    if native_available(x):
        counts = count.reshape(1).to(torch.int32)
        return torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_grad, sum_product, counts)
    scale = weight * invstd
    slope = scale * invstd.square() * sum_product / count
    offset = slope * mean - scale * sum_grad / count
    scale, slope, offset = (channelwise(each, x) for each in (scale, slope, offset))
    return (grad.to(mean.dtype) * scale - x.to(mean.dtype) * slope + offset).to(x.dtype)


def channelwise(values: Tensor, x: Tensor) -> Tensor:
    """Shape per-channel values [C] to multiply `x` [N, C, ...]."""
    return values.reshape(-1, *[1] * (x.ndim - 2))
