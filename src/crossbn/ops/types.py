"""What goes into a training step of a segment, a run of channels of a norm, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from crossbn.functional import Dependence, Flag, Operand


class NormTensors(NamedTuple):
    """What a norm has of its own, for a step that normalizes and moves the running statistics as well."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    eps: float
    momentum: float


class StepInputs(NamedTuple):
    """What a step reads of today. Nothing here has a graph that matters."""

    x: Tensor
    """[N, C, ...]: the segment's channels."""
    moments: tuple[Tensor, Tensor] | None
    """Mean and biased variance of `x`; None if they are to be found."""
    finite: Flag
    """Whether the moments of all the norm's channels are, if they are given."""
    operands: Sequence[Operand]
    """The operators that are summed into the channels; none where the past is not compensated."""
    bias: Tensor | None
    """[C]: the sum of their biases, which remembered means are without."""
    is_complete: bool
    """Whether the channels are nothing but that sum."""
    pooling: Flag
    """Where false the step is BatchNorm's, and not remembered."""
    remember: bool
    norm: NormTensors | None
    """If the norm reads nothing else: an implementation may then normalize as well."""


class Past(NamedTuple):
    """What is remembered: the steps' tensors [slots, ...] by name, in a ring, but for those `BY_AGE`."""

    rings: dict[str, Tensor]
    num_steps: Tensor
    """How many have been remembered so far, an int64 scalar."""
    is_readable: bool
    """Whether Python may look at values: they are on the CPU."""
    lock: AbstractContextManager[Any]
    """To be held while a step is written: threads may share a model."""
    scratch: list[Any]
    """What implementations keep from one step to the next; emptied when other tensors take the rings' place."""

    @property
    def slots(self) -> int:
        """How many steps fit."""
        return self.rings["mean"].shape[0]


class Statistics(NamedTuple):
    """What a segment is normalized with. Nothing here has a graph."""

    mean: Tensor
    """[C]: pooled."""
    var: Tensor
    """[C]: pooled, biased."""
    share: Tensor
    """[C] or [1]: today's weight in them."""
    bessel: float | Tensor
    """The pooled variance times this is unbiased; as [C] where it depends on the channel."""
    has_variance: Flag
    """Whether they are of more than one position; as [C] where that depends on the channel."""
    positions: int | Tensor
    """Positions of today's batch, of all processes together."""
    finite: Flag
    """Whether today's moments and the pooled ones are."""
    dependence: Dependence | None
    """How they follow the operators' weights; None where no gradient goes through the compensation."""


class Outcome(NamedTuple):
    """What a step came to."""

    statistics: Statistics
    commit: Callable[[], None] | None
    """Remembers the step, when the whole forward has come to its end; None if it is not to be remembered."""
    output: Tensor | None
    """The normalized input, if the step was asked for it and has made it; running statistics have then moved."""


class NotTheOperatorsOutput(Exception):  # noqa: N818  # not an error: the norm is plain for that step
    """The input of a norm is not what its operators' weights make of their inputs."""
