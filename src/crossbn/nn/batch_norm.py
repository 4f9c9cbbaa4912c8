"""What a norm does with its input and its running statistics: BatchNorm, and a belief (`prior="running"`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn import functional as C  # the library's F
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
        if (running := self._running) is not None:
            ops.move_running(found, running, self.momentum)


def has_seen_something(mean: Tensor, var: Tensor) -> bool:
    """Tell whether running statistics are others than those of a new norm, which are nobody's belief."""
    return not mean.is_meta and bool((mean != 0).any() or (var != 1).any())


class Belief:
    """How far a norm has drifted since its running statistics were loaded, or its history cleared.

    The belief itself is the norm's running mean and variance, which evaluation uses as well.

    Attributes:
        drift: [], D of `functional.pooling`.
    """

    def __init__(self, like: Tensor) -> None:
        self.drift = torch.zeros((), dtype=C.accumulation_dtype(like.dtype), device=like.device)

    @torch.no_grad()
    def join_(self, statistics: Sequence[ops.Statistics], norm: GuardedBatchNorm, leads: bool) -> Callable[[], None]:
        """Let the belief be among what the statistics of segments pool; return what moves it for good.

        That is to be called when the step is remembered: what the latest remembered step has moved by is the way from
        where the belief stands. Of several calls, streams or operators of a norm one `leads`: the others are of the
        same weights, or of others.
        """
        running, vectors = norm._running, [each.mean for each in statistics]
        assert running is not None
        like = vectors[0]
        before = torch.stack(running[:2]).to(like)
        step = torch.cat([_step_of(each, leads) for each in statistics], 1)
        drift = C.drifted(self.drift.to(like), step[0], step[1], before[1], norm.eps)
        moved = before[0] + step[0], before[1] * step[1].exp()
        noises = [each.latest.noise for each in statistics if each.latest is not None]
        sizes = [len(vector) for vector in vectors]
        rates, targets = [], []
        for each, belief in zip(statistics, zip(*(part.split(sizes) for part in moved), strict=True), strict=True):
            # What remembers nothing has no noise of its own to tell; that of its neighbours will do.
            noise = each.latest.noise if each.latest is not None else noises[0] if noises else 0.0
            beta = C.belief_weight(drift, noise, each.share)
            targets.append(torch.stack([each.mean, each.var * each.bessel]))
            rates.append((1 - beta).expand_as(each.mean))
            each.replace_(*C.blend(each.mean, each.var, each.share, each.dependence, belief, beta))
        told = step, torch.cat(targets, 1), torch.cat(rates), drift if leads else None, ops.joined(statistics).finite
        return partial(self._move, norm, *told)

    def _move(
        self, norm: GuardedBatchNorm, step: Tensor, target: Tensor, rate: Tensor, drift: Tensor | None, finite: C.Flag
    ) -> None:
        """Let the running statistics as they are now go with the weights, then towards those of the window."""
        running = norm._running
        assert running is not None
        momentum = 1 / (running[2] + 1).to(rate) if norm.momentum is None else norm.momentum
        before = torch.stack(running[:2]).to(target)
        moved = torch.stack([before[0] + step[0], before[1] * step[1].exp()])
        mean, var = torch.lerp(moved, target, rate * momentum).to(running[0].dtype)
        ops.take_over(mean, var, running, finite)
        if drift is None:
            return
        if finite is not True:
            drift = torch.where(torch.as_tensor(finite, device=drift.device), drift, self.drift.to(drift))
        if self.drift.device == drift.device and self.drift.dtype == drift.dtype:
            self.drift.copy_(drift)
        else:
            self.drift = drift


def _step_of(statistics: ops.Statistics, leads: bool) -> Tensor:
    """Return shift and growth [2, C] of the latest remembered step; 0 if there is none, or another call leads."""
    latest = statistics.latest if leads else None
    return torch.zeros_like(statistics.mean).expand(2, -1) if latest is None else torch.stack(latest[:2])
