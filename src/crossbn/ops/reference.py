"""A training step of a segment with torch's operators: on any device, for every setting. Others are held against it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Flag, Settings, TaylorTerms
from crossbn.ops.types import Moved, NotTheOperatorsOutput, Outcome, Past, Statistics, StepInputs


@torch.no_grad()
def step(inputs: StepInputs, past: Past, storage: C.Storage | None, settings: Settings) -> Outcome:
    """Pool today's moments with the remembered ones at today's weights, and make what is to be remembered.

    `storage` says how that is, and is None if nothing is compensated. The past is not changed.

    Raises:
        NotTheOperatorsOutput: if the input is not what the operators make of theirs.
    """
    with without_autocast(inputs.x.device.type):
        return _step(inputs, past, storage if past.slots and inputs.operands else None, settings)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context in which products are of the type of their factors."""
    is_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_autocast else nullcontext()


class _Today(NamedTuple):
    """The present step, of all processes that are joined."""

    mean: Tensor
    var: Tensor
    positions: int | Tensor
    finite: Flag
    terms: TaylorTerms | None
    local: Tensor | None  # this process's share of the positions; None for one process


def _step(inputs: StepInputs, past: Past, storage: C.Storage | None, settings: Settings) -> Outcome:
    assert inputs.moments is not None
    x, bias, (mean, var), finite = inputs.x, inputs.bias, inputs.moments, inputs.is_finite
    if not past.slots and settings.active_group is None:
        return Outcome(_alone(mean, var, x.numel() // x.shape[1], finite), None, None)
    kept, step_weights = past.recall(settings.rate, mean.dtype)
    operands = inputs.operands if storage is not None else ()
    weights = [C.flatten_weight(each.weight.detach(), each.geometry, each.bias).to(mean.dtype) for each in operands]
    old = kept["mean"], kept["var"]
    if inputs.carried and storage is not None:
        kept = _carry(kept, inputs)
    back = None if storage is None else storage.look_back(kept, weights)
    today = _Today(mean, var, x.numel() // x.shape[1], finite, None if back is None else back.terms, None)
    noise: Tensor | float = 0.0
    if (group := settings.active_group) is not None:
        today = _join(today, group)
    if settings.weights == "auto" and past.slots:
        price = C.gradient_price(len(x) * (1 if group is None else dist.get_world_size(group)))
        step_weights, noise = best_weights(past, kept, step_weights, today.positions, price)
    row, accept, sound = None, today.finite & inputs.pooling, cast(Flag, True)
    if inputs.remember and past.slots:
        row, is_theirs, sound = _row(inputs, past, storage, weights, today)
        if is_theirs is False and accept is not False:
            raise NotTheOperatorsOutput
        # A batch that is not finite gets plain BatchNorm, as does one that the operators have not made: nothing
        # remembered takes part, nor is it remembered.
        accept = accept & is_theirs
    if past.is_readable:
        accept, today = bool(accept), today._replace(finite=bool(today.finite))
        step_weights = step_weights if accept else mean.new_zeros(len(kept["mean"]))
    elif step_weights is not None:
        step_weights = step_weights * accept
    moved = old
    if today.terms is not None:
        moved = C.compensate(*moved, today.terms)
    if bias is not None:
        moved = moved[0] + bias, moved[1]
    pooled = C.pool(today.mean, today.var, *moved, step_weights, settings.invalid)
    if row is not None and settings.weights == "auto":
        differences = C.squared_differences(today.mean, today.var, *moved, pooled.var)
        differences = differences[past.slots_by_age(len(differences))]
        row["variogram"] = C.averaged(kept["variogram"], differences, past.num_steps)
    if row is not None and settings.consistent:
        known = pooled.mean if bias is None else pooled.mean - bias
        row |= {"pooled": torch.stack([known, pooled.var]), "number": mean.new_full((), inputs.number)}
    dependence = None
    if settings.backward == "through" and storage is not None and back is not None and len(moved[0]) > 0:
        dependence = _dependence(today, bias, back, pooled, storage)
    # Pooled moments may overflow where today's do not: then the past has to go by for them to be finite again.
    keep = accept & sound
    commit = None if row is None or keep is False else partial(past.write_, row, keep)
    counted = _counted(today, kept, pooled, step_weights is None and settings.invalid == "max")
    bessel, has_variance = _bessel(counted)
    finite = today.finite & C.all_finite(pooled.var)  # large but finite moments may add up to infinity
    latest = None
    if settings.prior is not None and len(moved[0]) > 0:
        latest = C.Latest(torch.zeros_like(mean), torch.zeros_like(mean), noise)
        if today.terms is not None:
            slot = past.slots_by_age(len(moved[0]))[:1]
            shift, slope, before = (each.index_select(0, slot)[0] for each in (*today.terms[:2], kept["var"]))
            latest = C.Latest(shift, C.growth_of(slope, before), noise)
    rest = dependence, bessel, has_variance, today.positions, finite, latest
    carried = None
    if settings.consistent and len(moved[0]) > 0:
        carried = Moved(*moved, old, (kept["pooled"][:, 0], kept["pooled"][:, 1]), kept["number"])
    return Outcome(Statistics(pooled.mean, pooled.var, pooled.share, *rest), commit, None, carried)


def _carry(kept: dict[str, Tensor], inputs: StepInputs) -> dict[str, Tensor]:
    """Return what is kept of the remembered steps as if today's norms had made their inputs, as far as it is known."""
    for i, (operand, carried) in enumerate(zip(inputs.operands, inputs.carried, strict=True)):
        if carried is None or operand.y is None or len(carried.mean) != len(kept["mean"]):
            continue
        sizes, output_sizes = tuple(operand.y.shape[2:]), tuple(operand.output_sizes)
        like = kept["mean"]
        inside = C.share_inside(operand.geometry, sizes, output_sizes, like.dtype, like.device)
        kept = {**C.move_inputs(kept, i, operand.geometry, inside, *carried.map_at(kept["number"]))}
    return kept


def _on_device(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a scalar like `like`; filled in there, because a copy from the CPU would be waited for."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def _alone(mean: Tensor, var: Tensor, positions: int, finite: Flag) -> Statistics:
    """Return the statistics of a segment that remembers nothing."""
    bessel, has_variance = _bessel(float(positions))
    return Statistics(mean, var, mean.new_ones(1), None, bessel, has_variance, positions, finite)


def _bessel(counted: Any) -> tuple[Any, Any]:
    """Return what makes a variance of so many positions unbiased, and whether there is one."""
    has_variance = counted > 1
    return counted / (counted - 1 * has_variance), has_variance  # a lone position keeps its variance, 0


def best_weights(
    past: Past, kept: dict[str, Tensor], is_there: Tensor | None, today: int | Tensor, price: float
) -> tuple[Tensor, Tensor]:
    """Return the weights [R] that the variogram speaks for, of the steps that are there, and the noise of a step.

    `today` are the positions of today's.
    """
    by_age = past.slots_by_age(len(kept["count"]))
    count = (kept["count"] if is_there is None else kept["count"] * is_there)[by_age]
    noise, drift = C.fit_line(kept["variogram"], (count > 0).to(count.dtype))
    return torch.empty_like(count).index_copy(0, by_age, C.best_weights(noise, drift, count, today, price)), noise


@torch.no_grad()
def make_row(
    inputs: StepInputs, past: Past, storage: C.Storage | None, weights: list[Tensor]
) -> tuple[dict[str, Tensor], Flag, Flag]:
    """Return what one process is to remember, whether it is the operators', and whether their inputs are finite."""
    assert inputs.moments is not None
    today = _Today(*inputs.moments, inputs.x.numel() // inputs.x.shape[1], inputs.is_finite, None, None)
    with without_autocast(inputs.x.device.type):
        return _row(inputs, past, storage, weights, today)


def _row(
    inputs: StepInputs, past: Past, storage: C.Storage | None, weights: list[Tensor], today: _Today
) -> tuple[dict[str, Tensor], Flag, Flag]:
    """Return what to remember of today, whether it is the operators', and whether their inputs are finite."""
    mean, bias, operands = today.mean, inputs.bias, inputs.operands
    row = {"mean": mean if bias is None else mean - bias, "var": today.var}
    row["count"] = _on_device(today.positions, mean)
    is_theirs = sound = cast(Flag, True)
    if storage is not None and any(operand.y is not None for operand in operands):
        is_whole = inputs.is_complete and today.local is None and all(operand.y is not None for operand in operands)
        phase = int(past.num_steps) if past.is_readable else past.num_steps
        seen = C.Observation(inputs.x, mean, today.var, bias, operands, weights, phase, today.local, is_whole)
        of_operators, is_theirs = storage.remember(seen)
        row |= of_operators
        # Inputs that a stride skips, or an activation bounds, may be infinite without the moments knowing.
        for i, operand in enumerate(operands):
            patch = storage.mean_patch_in(row, i)
            is_hidden = isinstance(storage, C.ActivatedStorage) or not operand.geometry.reads_every_input
            if patch is not None and is_hidden:
                finite = C.all_finite(patch)
                sound = sound & finite
                is_theirs = is_theirs | (~finite if isinstance(finite, Tensor) else not finite)  # it cannot be told
    return row, is_theirs, sound


def _dependence(
    today: _Today, bias: Tensor | None, back: C.LookBack, pooled: C.Pooled, storage: C.Storage
) -> C.Dependence:
    assert today.terms is not None
    local = 1 if today.local is None else today.local
    of_mean = (pooled.weight.sum(0) * local).expand_as(pooled.mean)
    of_bias = None if bias is None else (of_mean, pooled.dvar_dmean.sum(0) * local)
    jacobians = storage.jacobians(back, today.terms, pooled)
    return C.Dependence(jacobians, pooled.dvar_dvar, of_bias, storage.order == 2, storage.centres)


def _counted(today: _Today, kept: dict[str, Tensor], pooled: C.Pooled, all_count: bool) -> float | Tensor:
    """Return the positions of the steps that are pooled; if they are all of them, as a number."""
    if all_count:
        return float(kept["count"].sum()) + today.positions
    return ((pooled.weight > 0) * kept["count"].unsqueeze(1)).sum(0) + today.positions


def _join(today: _Today, group: dist.ProcessGroup) -> _Today:
    """Join what the processes know of the step.

    Each process keeps its own part of the gradients, scaled by its share of the positions, so that Taylor terms add up:
    one collective, and only vectors of the channels' size travel.
    """
    mean = today.mean
    terms = torch.stack([part for part in today.terms or () if part is not None] or [mean[:0]])
    flags = [_on_device(flag, mean) for flag in (today.finite, today.positions)]
    own = torch.cat([mean, today.var, terms.flatten(), torch.stack(flags)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    table = torch.stack(everyone)
    channels, counts = len(mean), table[:, -1]
    joint_mean, joint_var = C.join_moments(table[:, :channels], table[:, channels : 2 * channels], counts)
    parts = table[:, 2 * channels : -2].sum(0).unflatten(0, terms.shape)
    joint_terms = None if today.terms is None else TaylorTerms(*parts)
    total = counts.sum()
    return _Today(joint_mean, joint_var, total, table[:, -2].all(), joint_terms, flags[1] / total)
