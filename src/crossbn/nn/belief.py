"""The running statistics of a norm as a belief: `prior="running"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn import ops


def has_seen_something(mean: Tensor, var: Tensor) -> bool:
    """Tell whether running statistics are others than those of a new norm, which are nobody's belief."""
    return not mean.is_meta and bool((mean != 0).any() or (var != 1).any())


class Belief:
    """How far a norm's running statistics have moved with the weights since they were loaded, or the history cleared.

    The belief itself is the norm's running mean and variance, which evaluation uses as well.

    Attributes:
        way: [2, C], see `functional.belief`.
    """

    def __init__(self, channels: int, like: Tensor) -> None:
        self.way = torch.zeros(2, channels, dtype=C.accumulation_dtype(like.dtype), device=like.device)

    @torch.no_grad()
    def join(
        self,
        statistics: Sequence[ops.Statistics],
        running: tuple[Tensor, Tensor, Tensor],
        eps: float,
        momentum: float | None,
    ) -> tuple[list[ops.Statistics], Callable[[], None]]:
        """Return the statistics of segments with the belief among what they pool, and what moves it for good.

        Nothing has moved until that is called: a step that is not remembered leaves no trace.
        """
        dtype, device = statistics[0].mean.dtype, statistics[0].mean.device
        if self.way.device != device or self.way.dtype != dtype:
            self.way = self.way.to(device, dtype)
        before = torch.stack(running[:2]).to(dtype)
        moved, way = before.clone(), self.way.clone()
        rate = 1 / (running[2] + 1).to(dtype) if momentum is None else momentum
        blended, targets, start = [], [], 0
        for each in statistics:
            stop = start + len(each.mean)
            if each.latest is not None:
                shift, growth, _ = each.latest
                way[:, start:stop] = C.travelled(way[:, start:stop], shift, growth, before[1, start:stop], eps)
                moved[0, start:stop] += shift
                moved[1, start:stop] *= growth.exp()
            start = stop
        drift, start = C.drift_of(way), 0
        for each in statistics:
            stop = start + len(each.mean)
            belief = moved[0, start:stop], moved[1, start:stop]
            beta = C.belief_weight(drift, 0.0 if each.latest is None else each.latest.noise, each.share)
            mean, var, share, dependence = C.blend(each.mean, each.var, each.share, each.dependence, belief, beta)
            blended.append(_with(each, mean, var, share, dependence))
            target = torch.stack([each.mean, each.var * each.bessel])
            targets.append(torch.lerp(moved[:, start:stop], target, (rate * (1 - beta)).to(dtype)))
            start = stop
        finite = ops.joined(statistics).finite
        return blended, partial(self._move, torch.cat(targets, 1), way, running, finite)

    def _move(self, target: Tensor, way: Tensor, running: tuple[Tensor, Tensor, Tensor], finite: C.Flag) -> None:
        own = running[0].dtype
        ops.take_over(target[0].to(own), target[1].to(own), running, finite)
        self.way.copy_(
            way if finite is True else torch.where(torch.as_tensor(finite, device=way.device), way, self.way)
        )


def _with(
    statistics: ops.Statistics, mean: Tensor, var: Tensor, share: Tensor, dependence: C.Dependence | None
) -> ops.Statistics:
    rest = statistics.bessel, statistics.has_variance, statistics.positions, statistics.finite
    return ops.Statistics(mean, var, share, dependence, *rest)
