"""What is known at a training step, and joining it over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn.functional import Jacobian, join_moments

if TYPE_CHECKING:
    from crossbn.nn.pending import Pending


class DenseJacobian(NamedTuple):
    """How pooled statistics follow a weight of any shape: dmean/dW and dvar/dW [C, I], I the weight's size."""

    mean: Tensor
    var: Tensor


class Statistics(NamedTuple):
    """What a source says at a training step. Nothing here has a graph."""

    mean: Tensor
    """[C]: pooled."""
    var: Tensor
    """[C]: pooled, biased."""
    share: Tensor
    """[C] or [1]: today's weight in them."""
    bessel: float | Tensor
    """The pooled variance times this is unbiased; as [C] where it depends on the channel."""
    several: bool | Tensor
    """Whether it is of more than one position; as [C] where that depends on the channel."""
    positions: int | Tensor
    """Positions of today's batch, of all processes together."""
    finite: bool | Tensor
    """Whether today's moments and the pooled ones are."""
    jacobians: tuple[Jacobian, ...]
    """One per term; empty where no gradient goes through the compensation."""
    own: Tensor | None
    """[R, C]: d var / d past_var of the remembered steps, where there are Jacobians."""
    bias_jacobian: tuple[Tensor, Tensor] | None
    """[C] each: how the pooled mean and variance follow the terms' biases, if there are any."""
    pending: Pending | None
    """The step, to be remembered at the end of the forward; None if it is not to be, or another norm sees to it."""
    earlier: DenseJacobian | None = None
    """How they follow the weight before the previous norm, with layers=2."""


class Drift(NamedTuple):
    """What the change of weights since has done to each remembered step; see `functional.compensate`."""

    mean_shift: Tensor
    var_slope: Tensor
    curvature: Tensor | None


class Today(NamedTuple):
    """The present step, of all processes that are joined."""

    mean: Tensor
    var: Tensor
    positions: int | Tensor
    finite: bool | Tensor
    drift: Drift | None
    local: Tensor | None
    """This process's share of the positions; None for one process."""


def join(today: Today, group: dist.ProcessGroup) -> Today:
    """Join what the processes know of the step.

    Each process keeps its own part of the gradients, scaled by its share of the positions, so that drift adds up:
    one collective, and only vectors of the channels' size travel.
    """
    mean = today.mean
    drift = torch.stack([part for part in today.drift or () if part is not None] or [mean[:0]])
    flags = [torch.as_tensor(flag, dtype=mean.dtype, device=mean.device) for flag in (today.finite, today.positions)]
    own = torch.cat([mean, today.var, drift.flatten(), torch.stack(flags)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    table = torch.stack(everyone)
    channels, counts = len(mean), table[:, -1]
    joint_mean, joint_var = join_moments(table[:, :channels], table[:, channels : 2 * channels], counts)
    joint_drift = None
    if today.drift is not None:
        parts = table[:, 2 * channels : -2].sum(0).unflatten(0, drift.shape)
        joint_drift = Drift(parts[0], parts[1], parts[2] if len(parts) > 2 else None)
    total = counts.sum()
    return Today(joint_mean, joint_var, total, table[:, -2].all(), joint_drift, flags[1] / total)
