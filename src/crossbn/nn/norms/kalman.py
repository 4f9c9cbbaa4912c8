"""Kalman Normalization; the paper is named, and deviations are told, in `kalman_filter.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn.functional import geometry_of
from crossbn.nn.norms.base import RankedBatchNorm, channelwise
from crossbn.nn.norms.kalman_filter import Estimate, correct, observe, predict
from crossbn.torch_internals import backward_is_running


class Link(NamedTuple):
    """The norm before, and the operator between."""

    previous: KalmanNorm
    producer: nn.Module


class KalmanNorm(RankedBatchNorm):
    """BatchNorm whose training statistics are blended with what the preceding layer's let expect.

    Alone, or first in a chain, it is BatchNorm; `follow_` chains it. Evaluation is BatchNorm's, with running averages
    of the blended statistics. A chained norm cannot be computed again inside backward (activation checkpointing).

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variance, inside the root.
        momentum: of the running statistics; None for a cumulative average.
        affine: whether there are gamma and beta.
        track_running_stats: whether there are running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        dims: spatial dimensions; None for any.
        gain: weight of the batch's own statistics, above 0 and at most 1, which is BatchNorm.

    Raises:
        ValueError: for a gain out of range.

    Example:
        >>> first, conv = KalmanNorm(4), nn.Conv2d(4, 8, 3)
        >>> second = KalmanNorm(8).follow_(first, conv)
        >>> second(conv(first(torch.randn(2, 4, 6, 6)).relu())).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dims: int | None = 2,
        gain: float = 0.1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, dims=dims)
        if not 0 < gain <= 1:
            raise ValueError(f"gain must be above 0 and at most 1, got {gain!r}")
        self.gain = gain
        self._link: Link | None = None
        self._followers = 0
        self._estimate: Estimate | None = None
        self._unread = 0

    def follow_(self, previous: KalmanNorm, producer: nn.Module) -> KalmanNorm:
        """Predict from `previous`, whose output, rectified, is the input of `producer`, which feeds this norm.

        `previous` runs before this norm in every forward.

        Raises:
            ValueError: if the channels of the three do not fit, or the norm has a predecessor already.
            TypeError: if the producer is no convolution or linear layer; a transposed one is not.
        """
        geometry = geometry_of(producer)
        if geometry.transposed:
            raise TypeError(
                f"{self.label}: cannot predict through {producer}, whose outputs differ from place to place"
            )
        widths = (previous.num_features, self.num_features)
        if (geometry.in_channels, geometry.out_channels) != widths:
            raise ValueError(f"{self.label}: {producer} does not lead from {widths[0]} channels to {widths[1]}")
        if self._link is not None:
            raise ValueError(f"{self.label}: follows {self._link.previous.label} already")
        self._link = Link(previous, producer)
        previous._followers += 1
        return self

    @property
    def previous(self) -> KalmanNorm | None:
        """The norm that this one follows."""
        return None if self._link is None else self._link.previous

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        self._check_input_dim(x)
        if not self.uses_batch:
            assert self.running_mean is not None
            assert self.running_var is not None
            self._hand_on(Estimate(self.running_mean, self.running_var))
            return super().forward(x)
        self._check_positions(x)
        if self._link is None:
            return self._start_chain(x)
        if backward_is_running():
            raise RuntimeError(f"{self.label}: a chained KalmanNorm cannot be computed again inside backward")
        before = self._link.previous._take()
        return self._start_chain(x) if before is None else self._go_on(x, predict(before, self._link.producer))

    def _start_chain(self, x: Tensor) -> Tensor:
        if self._followers:
            self._hand_on(observe(x))
        return super().forward(x)

    def _go_on(self, x: Tensor, predicted: Estimate) -> Tensor:
        estimate = correct(predicted, observe(x), self.gain)
        self._hand_on(estimate)
        self._move_running(estimate.mean.detach(), estimate.var.detach())
        scale = torch.rsqrt(estimate.var + self.eps)
        if self.weight is not None:
            scale = self.weight * scale
        y = (x - channelwise(estimate.mean, x)) * channelwise(scale, x)
        return (y if self.bias is None else y + channelwise(self.bias, x)).to(x.dtype)

    def _hand_on(self, estimate: Estimate) -> None:
        if self._followers:
            self._estimate, self._unread = estimate, self._followers

    def _take(self) -> Estimate | None:
        """Return what a follower is to predict from; the last one to ask leaves nothing behind that has a graph."""
        estimate, self._unread = self._estimate, self._unread - 1
        if self._unread <= 0:
            self._estimate = None
        return estimate

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_estimate": None, "_unread": 0}
