"""A training step of a segment with torch's operators: on any device, for every setting. Others are held against it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Flag, Settings, TaylorTerms
from crossbn.ops.types import NotTheOperatorsOutput, Outcome, Past, Statistics, StepInputs


@torch.no_grad()
def step(inputs: StepInputs, past: Past, storage: C.Storage | None, settings: Settings) -> Outcome:
    """Pool today's moments with the remembered ones at today's weights, and make what is to be remembered.

    Args:
        inputs: today's.
        past: what is remembered; it is not changed.
        storage: how; None if nothing is compensated.
        settings: of the norm.

    Raises:
        NotTheOperatorsOutput: if the input is not what the operators make of theirs.
    """
    with _full_precision(inputs.x.device.type):
        return _step(inputs, past, storage if past.slots and inputs.operands else None, settings)


class _Today(NamedTuple):
    """The present step, of all processes that are joined."""

    mean: Tensor
    var: Tensor
    positions: int | Tensor
    finite: Flag
    terms: TaylorTerms | None
    local: Tensor | None
    """This process's share of the positions; None for one process."""


def _step(inputs: StepInputs, past: Past, storage: C.Storage | None, settings: Settings) -> Outcome:
    x = inputs.x
    assert inputs.moments is not None
    (mean, var), finite = inputs.moments, inputs.finite
    kept, step_weights = recall(past, settings.decay, mean.dtype)
    weights = [] if storage is None else [_rows(operand, mean.dtype) for operand in inputs.operands]
    back = None if storage is None else storage.look_back(kept, weights)
    today = _Today(mean, var, x.numel() // x.shape[1], finite, None if back is None else back.terms, None)
    if (group := settings.active_group) is not None:
        today = _join(today, group)
    if settings.weights == "auto":
        step_weights = best_weights(past, kept, step_weights, today.positions)
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
    moved = _moved(today, inputs.bias, kept)
    statistics = _pool(today, inputs.bias, kept, back, moved, storage, step_weights, settings)
    if row is not None and settings.weights == "auto":
        differences = C.squared_differences(today.mean, today.var, *moved, statistics.var)
        by_age = _slots_by_age(past, len(differences))
        row["variogram"] = C.averaged(kept["variogram"], differences[by_age], past.num_steps)
    # Pooled moments may overflow where today's do not: then the past has to go by for them to be finite again.
    commit = None if row is None or accept is False else partial(past.write_, row, accept & sound)
    return Outcome(statistics, commit, None)


def recall(past: Past, decay: float, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return what is remembered, [R, ...] by name, and the weights of the R steps, today's being 1; None if all are."""
    rings, slots, device = past.rings, past.slots, past.num_steps.device
    if past.is_readable:
        num_steps = int(past.num_steps)
        if num_steps < slots:
            rings = {name: ring[:num_steps] for name, ring in rings.items()}
        step_weights = C.weights_by_age(min(num_steps, slots), num_steps % max(slots, 1), decay, dtype, device).relative
    else:
        is_there = torch.arange(slots, device=device) < past.num_steps
        step_weights = torch.pow(decay, C.ages(slots, past.num_steps, device).to(dtype)) * is_there
    return {name: ring.to(dtype) for name, ring in rings.items()}, step_weights


def best_weights(past: Past, kept: dict[str, Tensor], is_there: Tensor | None, today: int | Tensor) -> Tensor:
    """Return the weights [R] that the variogram speaks for, of the steps that are there; `today` are the positions."""
    by_age = _slots_by_age(past, len(kept["count"]))
    count = (kept["count"] if is_there is None else kept["count"] * is_there)[by_age]
    noise, drift = C.fit_line(kept["variogram"], (count > 0).to(count.dtype))
    return torch.empty_like(count).index_copy(0, by_age, C.best_weights(noise, drift, count, today))


def _slots_by_age(past: Past, steps: int) -> Tensor:
    """Return which of the recalled steps is of age 1, 2 and so on."""
    return (past.num_steps - torch.arange(1, 1 + steps, device=past.num_steps.device)) % max(steps, 1)


def _rows(operand: C.Operand, dtype: torch.dtype) -> Tensor:
    return C.flatten_weight(operand.weight.detach(), operand.geometry).to(dtype)


def _row(
    inputs: StepInputs, past: Past, storage: C.Storage | None, weights: list[Tensor], today: _Today
) -> tuple[dict[str, Tensor], Flag, Flag]:
    """Return what to remember of today, whether it is the operators', and whether their inputs are finite."""
    mean, bias, operands = today.mean, inputs.bias, inputs.operands
    row = {"mean": mean if bias is None else mean - bias, "var": today.var}
    row["count"] = torch.as_tensor(today.positions, device=mean.device)
    is_theirs: Flag = True
    sound: Flag = True
    if storage is not None and any(operand.y is not None for operand in operands):
        is_whole = inputs.is_complete and today.local is None and all(operand.y is not None for operand in operands)
        phase = int(past.num_steps) if past.is_readable else past.num_steps
        seen = C.Observation(inputs.x, mean, today.var, bias, operands, weights, phase, today.local, is_whole)
        of_operators, is_theirs = storage.remember(seen)
        row |= of_operators
        # Inputs that a stride skips may be infinite without the moments knowing.
        for i, operand in enumerate(operands):
            patch = storage.mean_patch_in(row, i)
            if patch is not None and not operand.geometry.reads_every_input:
                finite = C.all_finite(patch)
                sound = sound & finite
                is_theirs = is_theirs | (~finite if isinstance(finite, Tensor) else not finite)  # it cannot be told
    return row, is_theirs, sound


def _moved(today: _Today, bias: Tensor | None, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the remembered means and variances at today's weights."""
    past_mean, past_var = kept["mean"], kept["var"]
    if today.terms is not None:
        past_mean, past_var = C.compensate(past_mean, past_var, today.terms)
    return past_mean if bias is None else past_mean + bias, past_var


def _pool(
    today: _Today,
    bias: Tensor | None,
    kept: dict[str, Tensor],
    back: C.LookBack | None,
    moved: tuple[Tensor, Tensor],
    storage: C.Storage | None,
    step_weights: Tensor | None,
    settings: Settings,
) -> Statistics:
    past_mean, past_var = moved
    pooled = C.pool(today.mean, today.var, past_mean, past_var, step_weights, settings.invalid)
    dependence = None
    if settings.backward == "through" and storage is not None and back is not None and len(past_mean) > 0:
        assert today.terms is not None
        local = 1 if today.local is None else today.local
        of_mean = (pooled.weight.sum(0) * local).expand_as(pooled.mean)
        of_bias = None if bias is None else (of_mean, pooled.dvar_dmean.sum(0) * local)
        jacobians = storage.jacobians(kept, back, today.terms, pooled)
        dependence = C.Dependence(jacobians, pooled.dvar_dvar, of_bias, settings.order == 2, storage.centres)
    counted: float | Tensor
    if step_weights is None and settings.invalid == "max":
        counted = float(kept["count"].sum()) + today.positions
    else:
        counted = ((pooled.weight > 0) * kept["count"].unsqueeze(1)).sum(0) + today.positions
    has_variance = counted > 1
    bessel = counted / (counted - 1 * has_variance)  # a lone position keeps its variance, 0
    finite = today.finite & C.all_finite(pooled.var)  # large but finite moments may add up to infinity
    return Statistics(pooled.mean, pooled.var, pooled.share, dependence, bessel, has_variance, today.positions, finite)


def _join(today: _Today, group: dist.ProcessGroup) -> _Today:
    """Join what the processes know of the step.

    Each process keeps its own part of the gradients, scaled by its share of the positions, so that Taylor terms add up:
    one collective, and only vectors of the channels' size travel.
    """
    mean = today.mean
    terms = torch.stack([part for part in today.terms or () if part is not None] or [mean[:0]])
    flags = [torch.as_tensor(flag, dtype=mean.dtype, device=mean.device) for flag in (today.finite, today.positions)]
    own = torch.cat([mean, today.var, terms.flatten(), torch.stack(flags)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    table = torch.stack(everyone)
    channels, counts = len(mean), table[:, -1]
    joint_mean, joint_var = C.join_moments(table[:, :channels], table[:, channels : 2 * channels], counts)
    joint_terms = None
    if today.terms is not None:
        parts = table[:, 2 * channels : -2].sum(0).unflatten(0, terms.shape)
        joint_terms = TaylorTerms(parts[0], parts[1], parts[2] if len(parts) > 2 else None)
    total = counts.sum()
    return _Today(joint_mean, joint_var, total, table[:, -2].all(), joint_terms, flags[1] / total)


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    needed = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if needed else nullcontext()
