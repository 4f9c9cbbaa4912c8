"""What a norm does with its input and its running statistics, before any pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn.functional import all_finite, library, native


class GuardedBatchNorm(_BatchNorm):
    """BatchNorm that says which layer a wrong input reached, and whose running statistics stay finite."""

    rank: tuple[int, ...] | None = None
    label: str

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        ranks = self.rank
        if input.ndim < 2 if ranks is None else input.ndim not in ranks:
            expected = "at least 2" if ranks is None else " or ".join(map(str, ranks))
            raise ValueError(f"{self.label}: expected an input of {expected} dimensions, got {tuple(input.shape)}")
        if input.shape[1] != self.num_features:
            raise ValueError(f"{self.label}: expected {self.num_features} channels, got {tuple(input.shape)}")

    def _batch_norm(self, x: Tensor, update: bool) -> Tensor:
        """Run torch's BatchNorm; running statistics move on copies and are taken over if they are finite."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        assert self.num_batches_tracked is not None
        running = self.running_mean, self.running_var, self.num_batches_tracked
        momentum = 1 / float(running[2] + 1) if self.momentum is None else self.momentum
        moved = running[0].clone(), running[1].clone()
        y = F.batch_norm(x, *moved, self.weight, self.bias, True, momentum, self.eps)
        if update:
            _take_over(running, *moved)
        return y

    def _move_running(
        self, mean: Tensor, var: Tensor, bessel: float | Tensor, several: bool | Tensor, finite: bool | Tensor
    ) -> None:
        """Move the running statistics towards `mean` and, where of `several` positions, `bessel * var`, if `finite`."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None or finite is False:
            return None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1 if finite is True else finite)
        momentum: float | Tensor | None = self.momentum
        sure = finite is True and several is True and isinstance(bessel, float)
        if sure and self.momentum is not None and library.fit(mean, var, self.running_mean, self.running_var):
            unbiased = float(bessel)
            return native.move_running(mean, var, unbiased, self.momentum, self.running_mean, self.running_var)
        if momentum is None:  # a cumulative average
            momentum = 1 / self.num_batches_tracked.clamp(min=1).to(mean.dtype)
        # A lone position has no variance: nothing is learnt from it.
        targets = (self.running_mean, mean, finite), (self.running_var, var * bessel, finite & several)
        for running, target, accept in targets:
            if accept is True and running.dtype == target.dtype:
                running.lerp_(target, momentum)
            else:
                moved = torch.lerp(running.to(target.dtype), target, momentum)
                running.copy_(torch.where(torch.as_tensor(accept, device=moved.device), moved, running))
        return None


def _take_over(running: tuple[Tensor, Tensor, Tensor], mean: Tensor, var: Tensor) -> None:
    """Let running mean and variance be `mean` and `var`, and count a step, if they are finite."""
    tracked = running[2]
    if library.fit(mean, var, *running[:2]) and tracked.is_cpu and tracked.dtype is torch.int64:
        return native.take_over(mean, var, running)
    finite = all_finite(var)  # it is not if the mean is not
    for before, after in zip(running, (mean, var), strict=False):
        if finite is True:
            before.copy_(after)
        elif isinstance(finite, Tensor):
            before.copy_(torch.where(finite, after, before))
    tracked.add_(1 if finite is True else finite)
    return None
