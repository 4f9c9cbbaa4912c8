"""What goes into a training step of a segment, a run of channels of a norm, and what comes out of it."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F


class NormTensors(NamedTuple):
    """What a norm has of its own, for a step that normalizes and moves the running statistics as well."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    eps: float
    momentum: float


class Variances:
    """Today's, of all channels of a norm that are new at a step: whether they are finite is looked at if it is asked.

    Attributes:
        vectors: those of its segments.
    """

    def __init__(self, *vectors: Tensor) -> None:
        self.vectors = vectors

    @functools.cached_property
    def are_finite(self) -> C.Flag:
        """Whether all of them are."""
        return C.all_finite(*self.vectors)


class StepInputs(NamedTuple):
    """What a step reads of today. Nothing here has a graph that matters."""

    x: Tensor  # [N, C, ...]: the segment's channels
    moments: tuple[Tensor, Tensor] | None  # mean and biased variance of `x`; None if they are to be found
    finite: C.Flag | Variances  # whether the moments of all the norm's channels are, if they are given
    operands: Sequence[C.Operand]  # those summed into the channels; none where the past is not compensated
    bias: Tensor | None  # [C]: the sum of their biases, which remembered means are without
    is_complete: bool  # whether the channels are nothing but that sum
    pooling: C.Flag  # where false the step is BatchNorm's, and not remembered
    remember: bool
    norm: NormTensors | None  # if the norm reads nothing else: an implementation may then normalize as well
    number: int = 0  # of the forward, from 1 on; 0 where remembered steps are not carried
    carried: Sequence[C.Carried | None] = ()  # to the operators' inputs, where anything is

    @property
    def is_finite(self) -> C.Flag:
        """What `finite` says."""
        return self.finite.are_finite if isinstance(self.finite, Variances) else self.finite


def flat_strides(x: Tensor) -> tuple[int, int, int] | None:
    """Return how far apart images, channels and places of `x` are; None if its places are not one after the other."""
    place = expected = 0
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size == 1:
            continue
        if expected and stride != expected:
            return None
        place, expected = place or stride, stride * size
    return x.stride(0), x.stride(1), place


class Past(NamedTuple):
    """What is remembered: the steps' tensors [slots, ...] by name, in a ring, but for those `BY_AGE`."""

    rings: dict[str, Tensor]
    num_steps: Tensor  # how many have been remembered so far, an int64 scalar
    is_readable: bool  # whether Python may look at values: they are on the CPU
    lock: AbstractContextManager[Any]  # to be held while a step is written: threads may share a model
    scratch: list[Any]  # of implementations, from step to step; emptied when other tensors take the rings' place

    @property
    def slots(self) -> int:
        """How many steps fit."""
        return self.rings["mean"].shape[0]

    def recall(self, decay: float, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return what is remembered, [R, ...] by name, and the steps' weights [R], today's being 1; None if all are."""
        rings, slots, device = self.rings, self.slots, self.num_steps.device
        if self.is_readable:
            num_steps = int(self.num_steps)
            if num_steps < slots:
                rings = {name: ring[:num_steps] for name, ring in rings.items()}
            weights = C.weights_by_age(min(num_steps, slots), num_steps % max(slots, 1), decay, dtype, device).relative
        else:
            is_there = torch.arange(slots, device=device) < self.num_steps
            weights = torch.pow(decay, C.ages(slots, self.num_steps, device).to(dtype)) * is_there
        return {name: ring.to(dtype) for name, ring in rings.items()}, weights

    def slots_by_age(self, steps: int) -> Tensor:
        """Return which of the recalled steps is of age 1, 2 and so on."""
        return (self.num_steps - torch.arange(1, 1 + steps, device=self.num_steps.device)) % max(steps, 1)

    def write_(self, row: Mapping[str, Tensor], accept: C.Flag = True) -> None:
        """Overwrite the oldest step with `row`, if `accept`; what it lacks is 0. A tensor is not looked at."""
        with self.lock:
            for name, value in row.items():
                if name.endswith(C.SAMPLES):
                    self.widen_(name, value.shape[0])
            if accept is False:
                return
            slot = (self.num_steps % self.slots).reshape(1)
            for name, ring in self.rings.items():
                is_by_age = name in C.BY_AGE
                new = _filled(ring if is_by_age else ring[0], row.get(name))
                if isinstance(accept, Tensor):
                    new = torch.where(accept, new, ring if is_by_age else ring.index_select(0, slot)[0])
                ring.copy_(new) if is_by_age else ring.index_copy_(0, slot, new.unsqueeze(0))
            self.num_steps.add_(accept)

    def widen_(self, name: str, size: int) -> None:
        """Let each step of `name` hold at least `size` samples; the new ones are 0."""
        ring = self.rings[name]
        if (missing := size - ring.shape[1]) > 0:
            self.rings[name] = torch.cat([ring, ring.new_zeros(len(ring), missing, *ring.shape[2:])], 1)
            self.scratch.clear()


def _filled(place: Tensor, value: Tensor | None) -> Tensor:
    """Return a value for its place; samples that the batch was too small for, or ages not yet reached, are 0."""
    if value is not None and value.shape == place.shape:
        return value.to(place.dtype)
    whole = torch.zeros_like(place)
    if value is not None:
        whole[: len(value)].copy_(value)
    return whole


@dataclass
class Statistics:
    """What a segment is normalized with. Nothing here has a graph."""

    mean: Tensor  # [C]: pooled
    var: Tensor  # [C]: pooled, biased
    share: Tensor  # [C] or [1]: today's weight in them
    dependence: C.Dependence | None  # on the operators' weights; None where no gradient goes through the compensation
    bessel: float | Tensor = 1.0  # the pooled variance times this is unbiased; as [C] where it depends on the channel
    has_variance: C.Flag = True  # whether they are of more than one position; as [C] where that depends on the channel
    positions: int | Tensor | None = None  # of today's batch, of all processes together; None if nobody needs them
    finite: C.Flag = True  # whether today's moments and the pooled ones are
    latest: C.Latest | None = None  # how the latest remembered step has moved; with a prior only

    @property
    def has_dependence(self) -> bool:
        """Whether they follow the operators' weights, without looking how."""
        return self.dependence is not None

    @property
    def derivative(self) -> C.Dependence:
        """The dependence, where there is one."""
        assert self.dependence is not None
        return self.dependence

    @property
    def place(self) -> int:
        """Where in memory they are: the same for norms that share them."""
        return self.derivative.jacobians[0].var_coefficient.data_ptr()

    def replace_(self, mean: Tensor, var: Tensor, share: Tensor, dependence: C.Dependence | None) -> None:
        """Let these be others of the same step."""
        self.mean, self.var, self.share, self.dependence = mean, var, share, dependence

    def unpacked(self) -> Statistics:
        """Return the same as an object and tensors of its own, for a norm that is to change what it shares."""
        own = self.mean, self.var, self.share, self.dependence, self.bessel, self.has_variance
        return Statistics(*own, self.positions, self.finite, self.latest)


Shapes = Sequence[tuple[int, ...] | None]
"""Of tensors that lie in one; None for what is not there."""

ALIGNED = 16
"""Numbers: each tensor begins at a multiple, where compiled code reads it faster; `csrc/library.c` has the same."""


def starts_in_one(shapes: Shapes) -> list[int]:
    """Return where tensors of these shapes begin that lie in one, one after the other, and where all end."""
    starts = [0]
    for shape in shapes:  # not every torch can trace itertools
        starts.append(starts[-1] + (0 if shape is None else -(-math.prod(shape) // ALIGNED) * ALIGNED))
    return starts


class Layout:
    """Where tensors of some shapes lie in one."""

    def __init__(self, shapes: Shapes) -> None:
        *starts, self.size = starts_in_one(shapes)
        self.places = [
            None if shape is None else (shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), start)
            for shape, start in zip(shapes, starts, strict=True)
        ]

    def part(self, packed: Tensor, i: int) -> Tensor | None:
        """Return the `i`-th of them, a view; None for what is not there."""
        if (place := self.places[i]) is None:
            return None
        shape, strides, start = place
        return packed.as_strided(shape, strides, packed.storage_offset() + start)


_VECTORS = ("mean", "var", "share")


def result_shapes(
    storage: C.Storage | None, rings: Mapping[str, Tensor], steps: int, wide: int, has_bias: bool
) -> list[tuple[int, ...] | None]:
    """Return the shapes of a step's results: mean, var, share and, if they follow operators, `Dependence.tensors`.

    They follow those of `storage`, through `steps` remembered ones of the `rings`; the weights of these are `wide`: one
    number, or one for each channel.
    """
    channels, samples = rings["mean"].shape[1], samples_in(rings)
    shapes: list[tuple[int, ...] | None] = [(channels,), (channels,), (wide,)]
    if storage is not None and steps > 0:
        of_bias, has_rest = (channels,) if has_bias else None, isinstance(storage, C.GradientStorage)
        shapes += [(steps, channels), of_bias, of_bias]
        for each in storage.geometries:
            shapes += [(steps, samples, each.groups, each.patch_size), (steps, wide), (steps, samples, channels)]
            shapes.append((channels, each.patch_size) if has_rest else None)
    return shapes


def samples_in(rings: Mapping[str, Tensor]) -> int:
    """Return how many rows there are of each step."""
    return rings["products"].shape[1] if "products" in rings else 1


class PackedStatistics(Statistics):
    """Statistics of one operator as an implementation has left them, in one tensor: taken apart if they are asked for.

    That is all that backward needs of a step, and it is allocated, kept by autograd and handed on as one.
    """

    def __init__(self, packed: Tensor, layout: Layout, bessel: float = 1.0, counted: float = 2.0, positions: int = 0):
        self.packed, self.layout, self.bessel, self.has_variance = packed, layout, bessel, counted > 1
        self.positions, self.finite, self.latest = positions, True, None

    def __getattr__(self, name: str) -> Any:
        found: Any = None
        if name in _VECTORS:
            found = self.layout.part(self.packed, _VECTORS.index(name))
        elif name != "dependence":
            raise AttributeError(name)
        elif self.has_dependence:
            rest = iter([self.layout.part(self.packed, i) for i in range(len(_VECTORS), len(self.layout.places))])
            found = C.Dependence.of_tensors(rest, 1, False, True)
        vars(self)[name] = found
        return found

    @property
    def has_dependence(self) -> bool:
        """Whether they follow the operator's weight."""
        return len(self.layout.places) > len(_VECTORS)

    @property
    def place(self) -> int:
        """Where in memory they are."""
        return self.packed.data_ptr()

    def replace_(self, mean: Tensor, var: Tensor, share: Tensor, dependence: C.Dependence | None) -> None:
        """Let these be others of the same step, in the same tensor."""
        for i, tensor in enumerate([mean, var, share, *([] if dependence is None else dependence.tensors())]):
            place = self.layout.part(self.packed, i)
            if place is not None and tensor is not None and tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor)


def joined(statistics: Sequence[Statistics]) -> Statistics:
    """Put the statistics of segments side by side; numbers that are not the same for all are repeated for channels."""
    if len(statistics) == 1:
        return statistics[0]
    if all(_has_vectors(each) for each in statistics):  # in one kernel
        whole = torch.cat([getattr(each, name) for name in (*_VECTORS, "bessel") for each in statistics])
        mean, var, share, bessel = whole.view(len(_VECTORS) + 1, -1).unbind()
        return Statistics(mean, var, share, None, bessel, positions=statistics[0].positions)

    def side_by_side(name: str) -> Any:
        values, parts = [getattr(each, name) for each in statistics], [each.mean for each in statistics]
        if not any(isinstance(value, Tensor) for value in values) and len(set(values)) == 1:
            return values[0]
        return torch.cat([_spread(value, part) for value, part in zip(values, parts, strict=True)])

    mean, var = torch.cat([each.mean for each in statistics]), torch.cat([each.var for each in statistics])
    flags = {id(each.finite): each.finite for each in statistics if each.finite is not True}  # often the same one
    finite = functools.reduce(operator.and_, flags.values(), True) if len(flags) != 1 else next(iter(flags.values()))
    rest = side_by_side("bessel"), side_by_side("has_variance"), statistics[0].positions, finite
    return Statistics(mean, var, side_by_side("share"), None, *rest)


def _has_vectors(statistics: Statistics) -> bool:
    """Tell whether all that is known of them is known for each channel, as one type."""
    values, mean = (statistics.bessel, statistics.var, statistics.share), statistics.mean
    if statistics.has_variance is not True or statistics.finite is not True:
        return False
    return all(isinstance(one, Tensor) and (one.shape, one.dtype) == (mean.shape, mean.dtype) for one in values)


def _spread(value: float | Tensor, part: Tensor) -> Tensor:
    """Return a value, or one for each channel, as one for each channel of `part` [C]."""
    if isinstance(value, Tensor):
        return value.expand_as(part)
    return torch.full_like(part, value, dtype=torch.bool if isinstance(value, bool) else None)


class Moved(NamedTuple):
    """What a step has made of the remembered ones, for the layers behind to know; [R, C] each but for `number` [R]."""

    mean: Tensor  # compensated
    var: Tensor
    old: tuple[Tensor, Tensor]  # as they were remembered
    pooled: tuple[Tensor, Tensor]  # what they were normalized with then
    number: Tensor  # of the forward that each step was


class Outcome(NamedTuple):
    """What a step came to."""

    statistics: Statistics
    commit: Callable[[], None] | None  # remembers the step, at the end of the whole forward; None if it is not to be
    output: Tensor | None
    """The normalized input, if the step was asked for it and has made it: then running statistics have moved, and the
    statistics are `PackedStatistics`."""
    moved: Moved | None = None  # where remembered steps are carried


class NotTheOperatorsOutput(Exception):  # noqa: N818  # not an error: the norm is plain for that step
    """The input of a norm is not what its operators' weights make of their inputs."""
