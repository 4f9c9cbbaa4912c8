"""A training step in compiled code, in the usual case: one operator, nothing added to it, first order, one process."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import library, native
from crossbn.functional.pooling import Votes
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


class Seen(NamedTuple):
    """A call's input and weight, dense, and where the output is looked at."""

    y: Tensor
    weight: Tensor
    site: C.Site


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
    if form is None or len(calls) != 1 or not each.complete or not library.in_use():
        return None
    if norm is not None and (positions == 1 or not _is_plain(norm)):  # a lone position is centred first, elsewhere
        return None
    call = calls[0]
    if call is None or not call.is_seen or x.dtype not in library.functions:
        return None
    source.history.move_(x)
    if not _is_usual(source, form, call):
        return None
    seen = _look(source, form, x, call, norm)
    if seen is None:
        return None
    history = source.history
    pushed = int(history.pushed)
    slot, steps = pushed % history.slots, min(pushed, history.slots)
    votes = C.votes_by_age(steps, slot, source.settings.decay, x.dtype, x.device)
    counted = sum(history["count"].tolist()) + positions
    today = moments or (x.new_empty(x.shape[1]), x.new_empty(x.shape[1]))
    pooled = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    output = None if norm is None else x.new_empty(x.shape)
    bessel = counted / (counted - 1) if counted > 1 else 1.0
    batch = _batch(x, today, moments is not None, pooled, votes, bessel, norm, output)
    row = _new_row(form, seen, x.shape[1]) if remember else {}
    memory, jacobian, own = _memory(history, form, steps, seen, x, votes, row)
    outcome = native.step(x.dtype, batch, memory, seen.site.structure)
    if outcome == native.NOT_FINITE:
        return None
    if outcome == native.NOT_THE_OPERATOR:
        raise NotTheirs
    if norm is not None:
        running = norm.running_mean, norm.running_var, norm.num_batches_tracked
        torch.autograd.graph.increment_version([tensor for tensor in running if tensor is not None])
    pending = None
    if remember and outcome == native.DONE:
        row |= {"mean": today[0], "var": today[1], "count": torch.tensor(float(positions), dtype=x.dtype)}
        pending = Pending(history, row, True)
    jacobians = (jacobian,) if steps else ()
    several = counted > 1
    found = Statistics(*pooled, votes.share, bessel, several, positions, True, jacobians, own, None, pending)
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


def _is_plain(norm: GuardedBatchNorm) -> bool:
    """Tell whether running statistics are there and move at a fixed rate."""
    tracked = norm.num_batches_tracked
    if norm.running_mean is None or norm.running_var is None or tracked is None or norm.momentum is None:
        return False
    return norm.track_running_stats and tracked.is_cpu and tracked.dtype is torch.int64


def _look(source: Source, form: Form, x: Tensor, call: Call, norm: GuardedBatchNorm | None) -> Seen | None:
    """Return what the operator has seen, if all that can be handed over."""
    y, weight, geometry = call.y, call.weight, call.geometry
    assert y is not None
    assert weight is not None
    if geometry.transposed:
        with torch.no_grad():
            weight = C.flatten_weight(weight, geometry)
    own = () if norm is None else (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    vectors = [vector for vector in own if vector is not None]
    if not library.fit(x, y, weight, source.history["mean"], *vectors) or not weight.is_contiguous():
        return None
    if x.shape[2:] != call.output_sizes or len(y) != len(x) or any(v.shape != x.shape[1:2] for v in vectors):
        return None
    assert form.positions is not None
    if source.tables is None or source.tables.key != C.Site.key_of(geometry, y, x):
        if not C.Site.has_room(geometry, x):
            return None
        source.tables = C.Site(geometry, y, x, form.positions)
    return Seen(y, weight, source.tables)


def _batch(
    x: Tensor,
    today: Moments,
    known: bool,
    pooled: Moments,
    votes: Votes,
    bessel: float,
    norm: GuardedBatchNorm | None,
    output: Tensor | None,
) -> native.Structure:
    always = {"known": known, "today_mean": today[0], "today_var": today[1], "votes": votes.each}
    always |= {"mean": pooled[0], "var": pooled[1], "bessel": bessel}
    if norm is None:
        return native.batch(x, **always)
    return native.batch(
        x,
        **always,
        gamma=norm.weight,
        beta=norm.bias,
        eps=norm.eps,
        output=output,
        momentum=norm.momentum,
        running_mean=norm.running_mean,
        running_var=norm.running_var,
        tracked=norm.num_batches_tracked,
    )


def _new_row(form: Form, seen: Seen, channels: int) -> Row:
    """Return room for what is to be kept of this step."""
    y, geometry = seen.y, form.terms[0].geometry
    groups, size = geometry.groups, geometry.patch_size
    if isinstance(form, Gradients):
        return {
            "0.mean_grad": y.new_empty(groups, size),
            "mean_at": y.new_empty(channels),
            "0.var_grad": y.new_empty(channels, size),
            "var_at": y.new_empty(channels),
        }
    amount = 1 + seen.site.amount
    rows, at, centred = y.new_empty(amount, groups, size), y.new_empty(amount, channels), y.new_empty(amount, channels)
    return {
        "0.rows": Pieces(rows[0], rows[1:]),
        "products": Pieces(at[0], at[1:]),
        "centred": Pieces(centred[0], centred[1:]),
    }


def _memory(
    history: History, form: Form, steps: int, seen: Seen, x: Tensor, votes: Votes, row: Row
) -> tuple[native.Structure, C.Jacobian, Tensor]:
    """Return what is remembered and will be, how the pooled moments will follow the weight, and d var / d past var."""
    geometry, channels, as_gradients = form.terms[0].geometry, x.shape[1], isinstance(form, Gradients)
    groups, size = geometry.groups, geometry.patch_size
    amount = 1 if as_gradients else history["0.rows"].shape[1]
    kept, coefficient = x.new_empty(steps, amount, groups, size), x.new_empty(steps, amount, channels)
    rest = x.new_empty(channels, size) if as_gradients else None
    own = x.new_empty(steps, channels)
    rings = _RINGS_OF_GRADIENTS if as_gradients else _RINGS
    arrays = {field: history[name] for field, name in rings.items()}
    if row:
        arrays |= {f"next_{field}": _whole(row[name]) for field, name in rings.items()}
        arrays["scratch"] = x.new_empty(seen.site.room(as_gradients))
    memory = native.memory(
        seen.y,
        weight=seen.weight,
        r=steps,
        m=amount,
        groups=groups,
        i=size,
        start=seen.site.start(int(history.pushed)),
        mean=history["mean"],
        var=history["var"],
        kept=kept,
        coefficient=coefficient,
        rest=rest,
        own=own,
        **arrays,
    )
    return memory, C.Jacobian(kept, votes.weight, coefficient, rest), own


def _whole(value: Tensor | Pieces) -> Tensor:
    """Return the tensor that both pieces are parts of, or the value itself."""
    if isinstance(value, Tensor):
        return value
    assert value.samples._base is not None
    return value.samples._base
