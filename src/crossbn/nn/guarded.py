"""What a norm does with its input and its running statistics, before any pooling."""

from __future__ import annotations

from typing import NoReturn

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
        expected_shape = (self.num_features,)
        if input.shape[1:2] != expected_shape:
            raise ValueError(f"{self.label}: expected {self.num_features} channels, got {tuple(input.shape)}")
        for vector in (self.weight, self.bias, self.running_mean, self.running_var):  # not every kernel asks
            if vector is not None and vector.shape != expected_shape:
                self._refuse(vector)

    def _refuse(self, vector: Tensor) -> NoReturn:
        """Say what has another size than the channels, in torch's words."""
        tensors = dict(self.named_parameters(recurse=False)) | dict(self.named_buffers(recurse=False))
        name = next((name for name, tensor in tensors.items() if tensor is vector), "a parameter")
        shape = tuple(vector.shape)
        raise RuntimeError(f"{self.label}: {name} should contain {self.num_features} elements, its shape is {shape}")

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
            return
        assert self.num_batches_tracked is not None
        running = self.running_mean, self.running_var, self.num_batches_tracked
        # None is for a cumulative average.
        momentum = 1 / (running[2] + 1).to(mean.dtype) if self.momentum is None else self.momentum
        moved_mean = _moved(running[0], mean, momentum)
        moved_var = _moved(running[1], var * bessel, momentum)
        if several is not True:  # A lone position has no variance: nothing is learnt from it.
            moved_var = torch.where(torch.as_tensor(several, device=moved_var.device), moved_var, running[1])
        _take_over(running, moved_mean, moved_var, finite)


def _moved(running: Tensor, target: Tensor, momentum: float | Tensor) -> Tensor:
    """Return where the running statistics get, in their own type, which may be the narrower one."""
    if running.dtype == target.dtype:
        return torch.lerp(running, target, momentum)
    return torch.lerp(running.to(target.dtype), target, momentum).to(running.dtype)


def _take_over(running: tuple[Tensor, Tensor, Tensor], mean: Tensor, var: Tensor, finite: bool | Tensor = True) -> None:
    """Let running mean and variance be `mean` and `var`, and count a step, if they are finite and so is all else."""
    tracked = running[2]
    if finite is True and library.fit(mean, var, *running[:2]) and tracked.is_cpu and tracked.dtype is torch.int64:
        native.take_over(mean, var, running)
        return
    finite = finite & all_finite(mean + var)
    if finite is False:
        return
    for before, after in zip(running, (mean, var), strict=False):
        before.copy_(torch.where(finite, after, before) if isinstance(finite, Tensor) else after)
    tracked.add_(finite)
