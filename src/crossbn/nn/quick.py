"""A training step in compiled code, in the usual case: one operator, nothing added to it, first order, one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import library, native
from crossbn.functional.pooling import Votes
from crossbn.nn.history import History
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Statistics

if TYPE_CHECKING:
    from crossbn.nn.guarded import GuardedBatchNorm
    from crossbn.nn.source import Named, Source

Moments = tuple[Tensor, Tensor]
"""Mean and biased variance."""


class Seen(NamedTuple):
    """An operator's output, its input, its weight, and where all that is."""

    x: Tensor
    y: Tensor
    weight: Tensor
    site: C.Site


class Owned(NamedTuple):
    """What a norm has of its own."""

    running_mean: Tensor
    running_var: Tensor
    tracked: Tensor
    momentum: float
    gamma: Tensor | None
    beta: Tensor | None
    eps: float


def observe(
    source: Source,
    x: Tensor,
    moments: Moments | None,
    remember: bool,
    asking: Named,
    norm: GuardedBatchNorm | None = None,
) -> tuple[Statistics, Tensor | None] | None:
    """Return the statistics of `source` at this step; None, and nothing has happened, if the case is another.

    Args:
        source: what feeds the channels.
        x: the channels, [N, C, ...].
        moments: its moments; None if they are to be found.
        remember: whether this step enters the history.
        asking: who asks.
        norm: the same, if it reads nothing else: then the output is returned, too, and running statistics have moved.
    """
    history, form, positions = source.history, source.form, x.numel() // x.shape[1]
    if form is None or not history.pushed.is_cpu or not _is_usual(source, asking.settings):
        return None
    if not (pushed := int(history.pushed)):
        return None
    owned = None if norm is None or positions == 1 else _owned(norm)  # a lone position is centred first, elsewhere
    if (norm is not None and owned is None) or (seen := _look(source, x, asking, owned)) is None:
        return None
    slot, steps = pushed % history.slots, min(pushed, history.slots)
    votes = C.votes_by_age(steps, slot, asking.settings.decay, x.dtype, x.device)
    counted = sum(history["count"].tolist()) + positions
    batch, pooled, output = _batch(x, moments, votes, owned)
    batch.bessel = counted / (counted - 1)
    history.make_room_(seen.site.amount)
    memory, jacobian, scratch = _memory(history, form.arrays, steps, seen, votes)
    memory.slot, memory.start = slot if remember else -1, seen.site.start(pushed)
    if moments is None:
        batch.today_mean, batch.today_var = scratch.data_ptr(), scratch.data_ptr() + x.shape[1] * x.element_size()
    if not native.step(x.dtype, batch, memory, seen.site.structure):
        return None
    if owned is not None:
        torch.autograd.graph.increment_version(owned[:3])
    return Statistics(*pooled, votes.share, batch.bessel, True, positions, True, (jacobian,), None), output


def _is_usual(source: Source, settings: Settings) -> bool:
    form, history, producers = source.form, source.history, source.producers
    if form is None or form.positions is None or not source.direct or len(producers) != 1:
        return False
    if settings.order != 1 or settings.invalid != "max" or settings.backward != "through" or settings.sync:
        return False
    if source.deeper is not None or history.narrow is not None or history.slots > native.MOST_STEPS:
        return False
    return type(history) is History and producers[0].has_run and producers[0].bias is None


def _owned(norm: GuardedBatchNorm) -> Owned | None:
    """Return what the norm has, if its running statistics are there and move at a fixed rate."""
    mean, var, tracked, momentum = norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum
    if mean is None or var is None or tracked is None or momentum is None or not norm.track_running_stats:
        return None
    if not tracked.is_cpu or tracked.dtype is not torch.int64:
        return None
    return Owned(mean, var, tracked, momentum, norm.weight, norm.bias, norm.eps)


def _look(source: Source, x: Tensor, asking: Named, owned: Owned | None) -> Seen | None:
    """Return what the operator has seen, if all that can be handed over."""
    producer, form = source.producers[0], source.form
    y, weight = producer.input_for(x, asking.label), producer.dense_weight()
    own = () if owned is None else (owned.running_mean, owned.running_var, owned.gamma, owned.beta)
    fits = library.fit(x, y, weight, source.history["mean"], *[each for each in own if each is not None])
    geometry = producer.geometry
    sizes = y.shape[1], weight.numel()  # of weights that have been replaced in place, too
    if not fits or not weight.is_contiguous() or sizes != (geometry.in_channels, x.shape[1] * geometry.patch_size):
        return None
    if source.site is None or source.site.key != C.Site.key_of(y, x):
        if not C.Site.has_room(geometry, x):
            return None
        assert form is not None
        assert form.positions is not None
        source.site = C.Site(geometry, y, x, form.positions)
    return Seen(x, y, weight, source.site)


def _batch(
    x: Tensor, moments: Moments | None, votes: Votes, owned: Owned | None
) -> tuple[native.Batch, Moments, Tensor | None]:
    """Return the batch, and where its pooled moments and its output go."""
    images, channels = x.shape[:2]
    mean, var = x.new_empty(channels), x.new_empty(channels)
    batch = native.Batch(
        *(x.data_ptr(), images, channels, x.numel() // (images * channels), x.stride(0), moments is not None),
        *map(_address, (*(moments or (None, None)), mean, var)),
    )
    batch.votes = _address(votes.each)
    if owned is None:
        return batch, (mean, var), None
    output = x.new_empty(x.shape)
    batch.output, batch.eps = output.data_ptr(), owned.eps
    batch.gamma, batch.beta = _address(owned.gamma), _address(owned.beta)
    batch.running_mean, batch.running_var = owned.running_mean.data_ptr(), owned.running_var.data_ptr()
    batch.tracked, batch.momentum = owned.tracked.data_ptr(), owned.momentum
    return batch, (mean, var), output


def _memory(
    history: History, names: tuple[str | None, ...], steps: int, seen: Seen, votes: Votes
) -> tuple[native.Memory, C.Jacobian, Tensor]:
    """Return what is remembered, how the pooled moments will follow the weight, and scratch to hold on to."""
    x, y, weight, site = seen
    arrays = [None if name is None else history[name] for name in names]
    rows = arrays[3]
    assert rows is not None
    (groups, size), channels, as_gradients = rows.shape[-2:], x.shape[1], rows.ndim == 3
    amount = 1 if as_gradients else rows.shape[1]
    kept, coefficient = x.new_empty(steps, amount, groups, size), x.new_empty(steps, amount, channels)
    rest = x.new_empty(channels, size) if as_gradients else None
    # Today's moments, the mean patch, what each thread needs, and of gradients what they are made of.
    before, needed = 2 * channels, site.scratch + site.scratch_a_thread * torch.get_num_threads()
    scratch = x.new_empty(before + needed + (site.samples if as_gradients else 0))
    memory = native.Memory(
        *(steps, amount, groups, size, 0, 0, weight.data_ptr(), y.data_ptr(), y.stride(0)),
        *map(_address, (*arrays, history.pushed, kept, coefficient, rest)),
        *(scratch.data_ptr() + place * x.element_size() for place in (before, before + needed)),
    )
    return memory, C.Jacobian(kept, votes.weight, coefficient, rest), scratch


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
