"""Batch-Instance Normalization.

Hyeonseob Nam, Hyo-Eun Kim, "Batch-Instance Normalization for Adaptively Style-Invariant Neural Networks", NeurIPS 2018,
https://arxiv.org/abs/1805.07925.

| paper | here | shape |
|---|---|---|
| x^(B), x^(I) | batch-normalized and instance-normalized input | [N, C, ...] |
| rho | `gate`, between 0 (instance) and 1 (batch); 1 at the beginning | [C] |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.nn.norms.base import RankedNorm, check_input

RANKS_WITH_SPACE: dict[int | None, tuple[int, ...]] = {1: (3,), 2: (4,), 3: (5,), None: (3, 4, 5)}
"""Dimensions of an input whose instances have statistics of their own: [N, C] is not among them."""


class BatchInstanceNorm(RankedNorm):
    """A mixture of BatchNorm and InstanceNorm, channel by channel: `gamma * (rho * x_B + (1 - rho) * x_I) + beta`.

    The gate is projected onto [0, 1] before each training step uses it, which is to say after each update, as in the
    paper. The paper trains it with ten times the learning rate of the rest; that is left to the optimizer.
    Evaluation takes BatchNorm's part from the running statistics.

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variances, inside the root.
        momentum: of the running statistics; None for a cumulative average.
        affine: whether there are gamma and beta.
        track_running_stats: whether there are running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        dims: spatial dimensions; None for any number but 0.

    Example:
        >>> norm = BatchInstanceNorm(8)
        >>> norm(torch.randn(2, 8, 4, 4)).shape
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
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, dims=dims)
        self.gate = nn.Parameter(torch.ones(num_features, device=device, dtype=dtype))

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        check_input(self.label, input, self.num_features, RANKS_WITH_SPACE[self.dims])

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        self._check_input_dim(x)
        if self.training:
            # Not an update that autograd should know of: where it changes anything, no graph has seen the gate since.
            self.gate.data.clamp_(0, 1)
        gate = self.gate if self.training else self.gate.clamp(0, 1)
        for_batch, for_instance = gate, 1 - gate
        if self.weight is not None:
            for_batch, for_instance = self.weight * for_batch, self.weight * for_instance
        return self._batch_norm(x, for_batch) + F.instance_norm(x, weight=for_instance, eps=self.eps)

    def _batch_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        running = (self.running_mean, self.running_var)
        if self.training and not self.track_running_stats:
            running = (None, None)
        elif self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return F.batch_norm(x, *running, weight, self.bias, self.uses_batch, momentum, self.eps)
