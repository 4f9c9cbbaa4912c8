"""A training step in compiled code, in the usual case: one operator, nothing added to it, first order, one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Statistics

if TYPE_CHECKING:
    from crossbn.nn.source import Named, Source

Affine = tuple[Tensor | None, Tensor | None, float]
"""Gamma, beta and eps."""


def observe(
    source: Source, x: Tensor, moments: tuple[Tensor, Tensor] | None, remember: bool, norm: Named, affine: Affine | None
) -> tuple[Statistics, Tensor | None] | None:
    """Return the statistics of `source` at this step and, with `affine`, the output; None if the case is another.

    Args:
        source: what feeds the channels.
        x: the channels, [N, C, ...].
        moments: its mean and biased variance; None if they are to be found.
        remember: whether this step enters the history.
        norm: who asks.
        affine: how to normalize, for a norm that reads nothing else.
    """
    rings, present = source.history.recall()
    positions = x.numel() // x.shape[1]
    if present is not None or not _is_usual(source, norm.settings) or not rings["mean"].shape[0]:
        return None
    if positions == 1:  # a lone position is centred before it is scaled, elsewhere
        affine = None
    producer, parameters = source.producers[0], [each for each in (affine or ())[:2] if isinstance(each, Tensor)]
    y, weight = producer.input_for(x, norm.label), producer.weight_value(x.dtype)
    if not C.library.fit(x, y, weight, rings["mean"], *parameters) or not C.Site.has_room(producer.geometry, x):
        return None
    assert source.form is not None
    slot = int(source.history.pushed) % source.history.slots
    votes = C.votes_by_age(rings["mean"].shape[0], slot, norm.settings.decay, x.dtype, x.device)
    batch = C.native.Batch(x, moments, votes, affine)
    jacobian = source.form.pool(rings, weight, batch)
    if jacobian is None:
        return None
    counted = sum(rings["count"].tolist()) + positions
    if remember:
        _write(source, x, y, batch)
    bessel = counted / (counted - 1)
    return Statistics(batch.mean, batch.var, votes.share, bessel, True, positions, True, (jacobian,), None), batch.y


def _is_usual(source: Source, settings: Settings) -> bool:
    form, history, producers = source.form, source.history, source.producers
    if form is None or form.positions is None or not source.direct or len(producers) != 1:
        return False
    if settings.order != 1 or settings.invalid != "max" or settings.backward != "through" or settings.sync:
        return False
    if source.deeper is not None or history.narrow is not None or history.slots > C.native.MOST_STEPS:
        return False
    return producers[0].has_run and producers[0].bias is None


def _write(source: Source, x: Tensor, y: Tensor, batch: C.native.Batch) -> None:
    form, history = source.form, source.history
    assert form is not None
    assert form.positions is not None
    if source.site is None or source.site.shapes != (y.shape, x.shape):
        source.site = C.Site(source.producers[0].geometry, y, x, form.positions)
    site, slot = source.site, history.next_slot(source.site.amount)
    step = site.step(x, y, batch.today_mean, batch.today_var, int(history.pushed))
    if form.write(site, step, slot):
        history.advance()
