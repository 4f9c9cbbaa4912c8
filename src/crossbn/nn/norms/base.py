"""What the norms with running statistics have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

RANKS: dict[int | None, tuple[int, ...]] = {1: (2, 3), 2: (4,), 3: (5,)}
"""Dimensions of the input [N, C, ...] by the number of spatial ones; a lone [N, C] counts as 1d, as in torch."""


def check_dims(dims: int | None) -> None:
    """Refuse a number of spatial dimensions for which there is no norm."""
    if dims is not None and dims not in RANKS:
        raise ValueError(f"dims must be 1, 2, 3 or None for any, got {dims!r}")


def check_input(label: str, x: Tensor, channels: int, ranks: tuple[int, ...] | None) -> None:
    """Refuse an input of another rank or width, naming the layer; `ranks` None takes any [N, C, ...]."""
    shape = tuple(x.shape)
    if x.ndim < 2 if ranks is None else x.ndim not in ranks:
        expected = "at least 2" if ranks is None else " or ".join(map(str, ranks))
        raise ValueError(f"{label}: expected an input of {expected} dimensions, got {shape}")
    if shape[1] != channels:
        raise ValueError(f"{label}: expected {channels} channels, got {shape}")


class RankedNorm(_NormBase):
    """Parameters, buffers and `state_dict` of BatchNorm, for input of `dims` spatial dimensions."""

    label: str

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
    ) -> None:
        check_dims(dims)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.dims = dims
        self.label = type(self).__name__

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        check_input(self.label, input, self.num_features, RANKS.get(self.dims))

    def _check_positions(self, x: Tensor) -> None:
        """Refuse, as BatchNorm does, a batch whose variance is 0 whatever it holds."""
        if x.numel() == x.shape[1]:
            raise ValueError(
                f"{self.label}: expected more than 1 value per channel when training, got {tuple(x.shape)}"
            )

    @property
    def uses_batch(self) -> bool:
        """Whether statistics are of the batch: in training, and where there are no running ones."""
        return self.training or self.running_mean is None

    @torch.no_grad()
    def _move_running(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards these, by `momentum` or as a cumulative average."""
        if not self.training or not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        momentum = self._step_size(mean.dtype)
        self.num_batches_tracked += 1
        for running, target in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(running.to(target.dtype) + (target - running) * momentum)

    def _step_size(self, dtype: torch.dtype) -> float | Tensor:
        """Return how far the running statistics move at this step."""
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None
        return 1 / (self.num_batches_tracked + 1).to(dtype)  # a cumulative average

    def extra_repr(self) -> str:
        """Return BatchNorm's line and the number of spatial dimensions."""
        return f"{super().extra_repr()}, dims={self.dims}"


class RankedBatchNorm(RankedNorm, _BatchNorm):
    """BatchNorm of `dims` spatial dimensions: the base of norms that are BatchNorm in evaluation.

    Being a `_BatchNorm`, they are paired, folded and recalibrated as one.
    """


def unbiased(var: Tensor, positions: int) -> Tensor:
    """Return the unbiased variance for a biased one of so many positions."""
    return var * (positions / max(positions - 1, 1))


def channelwise(values: Tensor, x: Tensor) -> Tensor:
    """Shape `values` [..., C] to be combined with `x` [N, C, ...]."""
    return values.reshape(*values.shape, *[1] * (x.ndim - 2))
