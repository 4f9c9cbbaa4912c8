"""The norms that torch has, behind BatchNorm's constructor.

| name | paper |
|---|---|
| BatchNorm | Sergey Ioffe, Christian Szegedy, ICML 2015, https://arxiv.org/abs/1502.03167 |
| InstanceNorm | Dmitry Ulyanov, Andrea Vedaldi, Victor Lempitsky, 2016, https://arxiv.org/abs/1607.08022 |
| LayerNorm | Jimmy Ba, Jamie Kiros, Geoffrey Hinton, 2016, https://arxiv.org/abs/1607.06450 |
| GroupNorm | Yuxin Wu, Kaiming He, ECCV 2018, https://arxiv.org/abs/1803.08494 |

The last three have no running statistics: `momentum` and `track_running_stats` are of no effect.
"""

import math
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from crossbn.nn.norms.base import RankedBatchNorm, check_dims, check_input
from crossbn.nn.norms.batch_instance import RANKS_WITH_SPACE

_BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def make_batch_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
    device: Any = None,
    dtype: Any = None,
    *,
    dims: int | None = 2,
) -> nn.Module:
    """Return torch's BatchNorm; for any number of dimensions one of our own, which torch does not have."""
    check_dims(dims)
    kind = partial(RankedBatchNorm, dims=None) if dims is None else _BATCH_NORMS[dims]
    return kind(num_features, eps, momentum, affine, track_running_stats, device, dtype)


class InstanceNorm(_InstanceNorm):
    """torch's InstanceNorm, but that it takes batches only.

    torch's own reads an input [N, C] as one example without a batch, which after a linear layer it is not.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        dims: int | None = 2,
    ) -> None:
        check_dims(dims)
        del track_running_stats  # an instance is normalized with its own statistics in evaluation too
        super().__init__(num_features, eps, 0.1 if momentum is None else momentum, affine, False, device, dtype)
        self.dims = dims
        self.label = type(self).__name__

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        check_input(self.label, input, self.num_features, RANKS_WITH_SPACE[self.dims])

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        self._check_input_dim(x)
        return F.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)


def make_group_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = False,
    device: Any = None,
    dtype: Any = None,
    *,
    dims: int | None = 2,
    groups: int | None = None,
) -> nn.GroupNorm:
    """Return torch's GroupNorm; without `groups` with 32, or as many of them as divide the channels: the gcd.

    Raises:
        ValueError: if `groups` does not divide the channels.

    Example:
        >>> [make_group_norm(channels).num_groups for channels in (64, 48, 7)]
        [32, 16, 1]
    """
    check_dims(dims)
    del momentum, track_running_stats
    if groups is not None and (groups < 1 or num_features % groups):
        divisors = ", ".join(str(each) for each in range(1, num_features + 1) if num_features % each == 0)
        raise ValueError(f"{num_features} channels cannot be in {groups} groups: give one of {divisors}")
    found = math.gcd(32, num_features) if groups is None else groups
    return nn.GroupNorm(found, num_features, eps, affine, device, dtype)


def make_layer_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = False,
    device: Any = None,
    dtype: Any = None,
    *,
    dims: int | None = 2,
) -> nn.GroupNorm:
    """Return LayerNorm over channels and space, which is GroupNorm with one group; gamma and beta are per channel."""
    options = (eps, momentum, affine, track_running_stats, device, dtype)
    return make_group_norm(num_features, *options, dims=dims, groups=1)
