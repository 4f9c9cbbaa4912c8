"""A training step in compiled code, in the usual case: one operator, nothing added to it, first order, one process."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import library, native
from crossbn.nn.call import Call
from crossbn.nn.feed import Input
from crossbn.nn.forms import Form
from crossbn.nn.gradient_form import Gradients
from crossbn.nn.guarded import GuardedBatchNorm
from crossbn.nn.history import History, Pieces, Row
from crossbn.nn.pending import Pending
from crossbn.nn.source import NotTheirs, Source
from crossbn.nn.statistics import Statistics

Moments = tuple[Tensor, Tensor]
"""Mean and biased variance."""

_RINGS = {"rows": "0.rows", "at": "products", "centred": "centred"}
_RINGS_OF_GRADIENTS = {"rows": "0.mean_grad", "at": "mean_at", "var_grad": "0.var_grad", "var_at": "var_at"}
"""Where compiled code finds what the two forms keep."""


class Workspace:
    """What a step needs and the next one can use again: structures, a row to be remembered, and scratch.

    It belongs to one step at a time, from its forward until it is remembered. Threads that share a model have one each.
    """

    def __init__(self, site: C.Site, form: Form, y: Tensor) -> None:
        self.site = site
        self.as_gradients = isinstance(form, Gradients)
        self.rings = _RINGS_OF_GRADIENTS if self.as_gradients else _RINGS
        geometry = form.terms[0].geometry
        self.groups, self.patch_size = geometry.groups, geometry.patch_size
        channels, amount = geometry.out_channels, 1 + site.amount
        shapes: list[tuple[int, ...]] = [(amount, self.groups, self.patch_size), (amount, channels), (amount, channels)]
        if self.as_gradients:
            shapes = [(self.groups, self.patch_size), (channels,), (channels, self.patch_size), (channels,)]
        whole = [y.new_empty(shape) for shape in shapes]
        parts = whole if self.as_gradients else [Pieces(each[0], each[1:]) for each in whole]
        self.row: Row = dict(zip(self.rings.values(), parts, strict=True))
        self._holds = whole, y.new_empty(site.room(self.as_gradients))
        self._next = [(f"next_{name}", each.data_ptr()) for name, each in zip(self.rings, whole, strict=True)]
        self.threads = torch.get_num_threads()
        self.batch, self.memory = native.structures_for(y.dtype)
        self.memory.groups, self.memory.i, self.memory.scratch = (
            self.groups,
            self.patch_size,
            self._holds[1].data_ptr(),
        )

    def fits(self, geometry: C.Geometry, y: Tensor, x: Tensor) -> bool:
        """Tell whether it was made for such a call."""
        return self.site.key == C.Site.key_of(geometry, y, x) and self.threads == torch.get_num_threads()

    def remember(self, wanted: bool) -> None:
        """Let the row be filled, or not."""
        for name, address in self._next:
            setattr(self.memory, name, address if wanted else None)


def observe(
    each: Input, x: Tensor, moments: Moments | None, remember: bool, norm: GuardedBatchNorm | None
) -> tuple[Statistics, Tensor | None] | None:
    """Return the statistics of a segment at this step; None, and nothing has happened, if the case is another.

    Args:
        each: the segment, and what it reads.
        x: its channels, [N, C, ...].
        moments: of `x`; None if they are to be found.
        remember: whether this step is to enter the history.
        norm: the one that asks, if it reads nothing else: then the output is returned, too, and running statistics
            have moved.

    Raises:
        NotTheirs: if `x` is not what the operator makes of its input.
    """
    source, calls = each.segment.source, each.calls
    form, positions = source.form, x.numel() // x.shape[1]
    if form is None or len(calls) != 1 or not each.complete or x.dtype not in library.functions:
        return None
    own = None if norm is None or positions == 1 else _owned(norm)  # a lone position is centred first, elsewhere
    if norm is not None and own is None:
        return None
    call = calls[0]
    if call is None or not call.is_seen:
        return None
    history = source.history
    history.move_(x)
    if not _is_usual(source, form, call):
        return None
    weight = _dense_weight(call)
    if not _can_be_handed_over(source, x, call, weight, own):
        return None
    work = _workspace(source, form, x, call)
    if work is None:
        return None
    pushed = int(history.pushed)
    steps = min(pushed, history.slots)
    votes = C.votes_by_age(steps, pushed % history.slots, source.settings.decay, x.dtype, x.device)
    counted = sum(history["count"].tolist()) + positions
    bessel = counted / (counted - 1) if counted > 1 else 1.0
    today_mean, today_var, mean, var = x.new_empty(4, x.shape[1]).unbind()
    if moments is not None:
        today_mean, today_var = moments
    output = None if own is None else x.new_empty(x.shape)
    _fill_batch(work, x, (today_mean, today_var), moments is not None, (mean, var), votes.each, bessel, own, output)
    jacobian, of_var = _fill_memory(work, history, steps, pushed, x, call, weight, votes.weight)
    work.remember(remember)
    outcome = native.step(x.dtype, work.batch, work.memory, work.site.structure)
    if outcome == native.NOT_FINITE:
        return None
    if outcome == native.NOT_THE_OPERATOR:
        raise NotTheirs
    if own is not None:
        torch.autograd.graph.increment_version(own.running)
    pending = None
    if remember and outcome == native.DONE:
        row = {**work.row, "mean": today_mean, "var": today_var, "count": _number(positions, x.dtype)}
        pending = Pending(history, row, True, functools.partial(source.workspaces.append, work))
    else:
        source.workspaces.append(work)
    jacobians = (jacobian,) if steps else ()
    found = Statistics(mean, var, votes.share, bessel, counted > 1, positions, True, jacobians, of_var, None, pending)
    return found, output


def _is_usual(source: Source, form: Form, call: Call) -> bool:
    history, settings = source.history, source.settings
    if form.positions is None or source.deeper is not None or call.bias is not None or not call.is_whole:
        return False
    if settings.order != 1 or settings.invalid != "max" or settings.backward != "through" or settings.sync:
        return False
    if history.narrow is not None or not 0 < history.slots <= native.MOST_STEPS or type(history) is not History:
        return False
    return history.pushed.is_cpu and not source.has_bias


class Owned(NamedTuple):
    """What a norm has of its own; running statistics are mean, variance and how many steps they have seen."""

    running: tuple[Tensor, Tensor, Tensor]
    gamma: Tensor | None
    beta: Tensor | None
    eps: float
    momentum: float


def _owned(norm: GuardedBatchNorm) -> Owned | None:
    """Return what the norm has, if its running statistics are there and move at a fixed rate."""
    buffers = norm._buffers  # not as attributes, which a Module looks for in three places
    mean, var, tracked = (buffers.get(name) for name in ("running_mean", "running_var", "num_batches_tracked"))
    if mean is None or var is None or tracked is None or norm.momentum is None or not norm.track_running_stats:
        return None
    if not tracked.is_cpu or tracked.dtype is not torch.int64:
        return None
    return Owned((mean, var, tracked), norm.weight, norm.bias, norm.eps, norm.momentum)


def _dense_weight(call: Call) -> Tensor:
    assert call.weight is not None
    if not call.geometry.transposed:
        return call.weight
    with torch.no_grad():
        return C.flatten_weight(call.weight, call.geometry)


def _can_be_handed_over(source: Source, x: Tensor, call: Call, weight: Tensor, own: Owned | None) -> bool:
    y, size = call.y, x.shape[1:2]
    assert y is not None
    vectors = [] if own is None else [v for v in (*own.running[:2], own.gamma, own.beta) if v is not None]
    if x.shape[2:] != call.output_sizes or len(y) != len(x) or any(vector.shape != size for vector in vectors):
        return False
    return library.fit(x, y, weight, source.history["mean"], *vectors) and weight.is_contiguous()


def _workspace(source: Source, form: Form, x: Tensor, call: Call) -> Workspace | None:
    """Return one that no other step has, for this step to have; None if its tables would be too large."""
    y, geometry = call.y, call.geometry
    assert y is not None
    assert form.positions is not None
    try:
        work: Workspace = source.workspaces.pop()  # one operation: no other thread gets the same
        if work.fits(geometry, y, x):
            return work
    except IndexError:
        pass
    if not C.Site.has_room(geometry, x):
        return None
    return Workspace(C.Site(geometry, y, x, form.positions), form, y)


@functools.lru_cache(256)
def _number(value: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # it is kept, and used in training as well
        return torch.tensor(float(value), dtype=dtype, device="cpu")


def _fill_batch(
    work: Workspace,
    x: Tensor,
    today: Moments,
    known: bool,
    pooled: Moments,
    votes: Tensor | None,
    bessel: float,
    own: Owned | None,
    output: Tensor | None,
) -> None:
    batch = work.batch
    batch.x, batch.n, batch.c, batch.s, batch.x_stride = native.extent(x)
    batch.known, batch.votes, batch.bessel = known, _address(votes), bessel
    batch.today_mean, batch.today_var = today[0].data_ptr(), today[1].data_ptr()
    batch.mean, batch.var = pooled[0].data_ptr(), pooled[1].data_ptr()
    batch.output = _address(output)
    if own is None:
        batch.running_mean = None
        return
    batch.gamma, batch.beta, batch.eps, batch.momentum = _address(own.gamma), _address(own.beta), own.eps, own.momentum
    batch.running_mean, batch.running_var, batch.tracked = (each.data_ptr() for each in own.running)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fill_memory(
    work: Workspace,
    history: History,
    steps: int,
    pushed: int,
    x: Tensor,
    call: Call,
    weight: Tensor,
    of_mean: Tensor,
) -> tuple[C.Jacobian, Tensor]:
    """Return how the pooled moments will follow the weight, and d var / d past var."""
    memory, y, channels = work.memory, call.y, x.shape[1]
    assert y is not None
    amount = 1 if work.as_gradients else history["0.rows"].shape[1]
    kept = x.new_empty(steps, amount, work.groups, work.patch_size)
    coefficient, own = x.new_empty(steps, amount, channels), x.new_empty(steps, channels)
    rest = x.new_empty(channels, work.patch_size) if work.as_gradients else None
    memory.r, memory.m, memory.start = steps, amount, work.site.start(pushed)
    memory.weight, memory.y, memory.y_stride = weight.data_ptr(), y.data_ptr(), y.stride(0)
    memory.mean, memory.var = history["mean"].data_ptr(), history["var"].data_ptr()
    for field, name in work.rings.items():
        setattr(memory, field, history[name].data_ptr())
    memory.kept, memory.coefficient, memory.own = kept.data_ptr(), coefficient.data_ptr(), own.data_ptr()
    memory.rest = _address(rest)
    return C.Jacobian(kept, of_mean, coefficient, rest), own
