"""What a norm does with its input and its running statistics, before any pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn import ops
from crossbn.torch_internals import BatchNormBase


class GuardedBatchNorm(BatchNormBase):
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

    def _check_vectors(self) -> None:
        expected_shape = (self.num_features,)
        for name, vector in (*self._parameters.items(), *self._buffers.items()):  # not every kernel asks
            if vector is not None and vector.shape != expected_shape and name != "num_batches_tracked":
                shape = tuple(vector.shape)
                raise RuntimeError(
                    f"{self.label}: {name} should contain {self.num_features} elements, its shape is {shape}"
                )

    @property
    def _running(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Running mean and variance, and how many steps they have seen; None if they are not kept."""
        buffers = self._buffers  # not as attributes, which a Module looks for in three places
        mean, var, tracked = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        if not self.track_running_stats or mean is None or var is None:
            return None
        assert tracked is not None
        return mean, var, tracked

    def _norm_tensors(self) -> ops.NormTensors | None:
        """Return what a step may use to normalize and to move the running statistics as well."""
        running = self._running
        if running is None or self.momentum is None:
            return None
        own = self._parameters
        if "weight" in own and "bias" in own:
            gamma, beta = own["weight"], own["bias"]
        else:  # of a replica of DataParallel, or pruned, or parametrized
            gamma, beta = self.weight, self.bias
        return ops.NormTensors(*running, gamma, beta, self.eps, self.momentum)

    def _batch_norm(self, x: Tensor, update: bool) -> Tensor:
        """Run torch's BatchNorm; running statistics move on copies and are taken over if they are finite."""
        running = self._running
        if running is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        momentum = 1 / float(running[2] + 1) if self.momentum is None else self.momentum
        moved = running[0].clone(), running[1].clone()
        y = F.batch_norm(x, *moved, self.weight, self.bias, True, momentum, self.eps)
        if update:
            ops.take_over(*moved, running)
        return y

    def _move_running(self, found: ops.Statistics) -> None:
        """Move the running statistics towards the mean and the unbiased variance, where there is one, if finite."""
        running = self._running
        if running is None or found.finite is False:
            return
        # None is for a cumulative average.
        momentum = 1 / (running[2] + 1).to(found.mean.dtype) if self.momentum is None else self.momentum
        pairs = zip(running[:2], (found.mean, found.var * found.bessel), strict=True)
        # Their own type may be the narrower one.
        mean, var = [torch.lerp(old.to(target.dtype), target, momentum).to(old.dtype) for old, target in pairs]
        if found.has_variance is not True:  # A lone position has no variance: nothing is learnt from it.
            var = torch.where(torch.as_tensor(found.has_variance, device=var.device), var, running[1])
        ops.take_over(mean, var, running, found.finite)
