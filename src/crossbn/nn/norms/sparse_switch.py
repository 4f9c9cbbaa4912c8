"""Sparse Switchable Normalization; the paper is named in `sparsest_max.py`, the rest of the method in `switch.py`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crossbn.functional import accumulation_dtype
from crossbn.nn.norms.ramp import Ramp
from crossbn.nn.norms.sparsest_max import circumradius, sparsest_max
from crossbn.nn.norms.switch import SwitchNorm


class SparseSwitchNorm(SwitchNorm):
    """SwitchNorm that ends up with one kind of statistics for the mean and one for the variance.

    SparsestMax takes softmax's place. Its radius grows in a straight line from 0 to the circumradius over `steps`
    training steps, counted by `num_batches_tracked`; then the choice is made, and no gradient reaches the logits. The
    authors' code also freezes the logits of a layer that has chosen earlier; here their gradient is 0 while it has.

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variance, inside the root.
        momentum: of the running statistics; None for a cumulative average.
        affine: whether there are gamma and beta.
        track_running_stats: must be True: its counter is the clock.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        dims: spatial dimensions; None for any.
        steps: training steps until the choice is made; the paper's are those of the whole run.

    Raises:
        ValueError: without running statistics.

    Example:
        >>> norm = SparseSwitchNorm(8, steps=1000)
        >>> norm.num_batches_tracked += 1000
        >>> norm.ratios(norm.mean_logits).tolist()
        [1.0, 0.0, 0.0]
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
        steps: int = 100_000,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, dims=dims)
        if not track_running_stats:
            raise ValueError("SparseSwitchNorm needs running statistics, got track_running_stats=False")
        self.schedule = Ramp(0.0, 1.0, 0, steps)

    def ratios(self, logits: Tensor) -> Tensor:
        """Return the importance of each kind of statistics, some of them exactly 0."""
        assert self.num_batches_tracked is not None
        progress = self.schedule(self.num_batches_tracked.to(accumulation_dtype(logits.dtype)))
        return sparsest_max(logits, progress * circumradius(len(logits)))
