"""A training step of a segment as one operator of torch, `crossbn::step`, which torch.compile does not look into.

What the step needs of settings and operators travels as numbers, so that a graph that was compiled in one process means
the same in another. The history is written in place. The results come as one tensor, because an operator that writes
in place may return no list of them, of one size, that of a full window: where steps are missing they are 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn import ops
from crossbn.functional import Settings
from crossbn.messages import say
from crossbn.ops.types import NotTheOperatorsOutput, Past, Statistics, StepInputs
from crossbn.torch_internals import process_group_called

_BACKWARD, _INVALID, _TYPES = ("through", "detached"), ("max", "drop"), (None, torch.bfloat16)
_WEIGHTS = ("equal", "auto")

torch.library.define(
    "crossbn::step",
    "(Tensor x, Tensor?[] inputs, Tensor[] weights, Tensor? bias, Tensor(a!)[] rings, Tensor(b!) num_steps, "
    "Tensor burnt, int[] numbers, float decay, str group, bool is_complete, bool remember) -> Tensor",
)


def step(
    x: Tensor,
    operands: Sequence[C.Operand],
    bias: Tensor | None,
    past: Past,
    burnt: Tensor,
    storage: C.Storage | None,
    settings: Settings,
    is_complete: bool,
    remember: bool,
) -> Statistics:
    """Do a step and remember it; `burnt` says how much of burn-in is over."""
    numbers = _numbers(settings, [operand.geometry for operand in operands])
    group = settings.process_group.group_name if settings.process_group is not None else ""
    found = torch.ops.crossbn.step(
        x,
        [operand.y for operand in operands],
        [operand.weight.detach() for operand in operands],
        bias,
        list(past.rings.values()),
        past.num_steps,
        burnt,
        numbers,
        settings.decay,
        group,
        is_complete,
        remember,
    )
    shapes = _shapes(x.shape[1], storage, past.rings, settings, bias is not None)
    parts = found.split([math.prod(shape) for shape in shapes])
    results = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return _statistics(results, settings, len(operands), bias is not None)


def _numbers(settings: Settings, geometries: Sequence[C.Geometry]) -> list[int]:
    numbers = [settings.window, settings.burn_in, settings.order]
    numbers += [-1 if settings.positions is None else settings.positions]
    numbers += [_BACKWARD.index(settings.backward), _INVALID.index(settings.invalid), int(settings.sync)]
    numbers += [_TYPES.index(settings.history_dtype), _WEIGHTS.index(settings.weights)]
    for geometry in geometries:
        numbers += geometry.numbers()
    return numbers


@functools.lru_cache(4096)
def _meaning(numbers: tuple[int, ...], decay: float) -> tuple[Settings, tuple[C.Geometry, ...], C.Storage | None]:
    """Return settings, geometries and storage from what `_numbers` made of them."""
    window, burn_in, order, positions, backward, invalid, sync, narrow, weights = numbers[:9]
    settings = Settings(
        window=window,
        burn_in=burn_in,
        order=order,
        positions=None if positions < 0 else positions,
        backward=_BACKWARD[backward],
        invalid=_INVALID[invalid],
        sync=bool(sync),
        history_dtype=_TYPES[narrow],
        decay=decay,
        weights=_WEIGHTS[weights],
    )
    rest, geometries = list(numbers[9:]), []
    while rest:
        left = iter(rest)
        geometries.append(C.Geometry.from_numbers(left))
        rest = list(left)
    return settings, tuple(geometries), C.make_storage(geometries, settings)


@functools.lru_cache(1024)
def _scratch(*_: Any) -> list[Any]:
    """Return what implementations keep between steps of one operator at one size, for rings at the same addresses."""
    return []


def _rings(storage: C.Storage | None, settings: Settings, channels: int, rings: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(C.history_shapes(channels, storage, settings), rings, strict=True))


def _run(
    x: Tensor,
    inputs: list[Tensor | None],
    weights: list[Tensor],
    bias: Tensor | None,
    rings: list[Tensor],
    num_steps: Tensor,
    burnt: Tensor,
    numbers: list[int],
    decay: float,
    group: str,
    is_complete: bool,
    remember: bool,
) -> Tensor:
    settings, geometries, storage = _meaning(tuple(numbers), decay)
    if group:
        settings = replace(settings, process_group=process_group_called(group))
    scratch = _scratch(tuple(numbers), x.shape, x.dtype, *(ring.data_ptr() for ring in rings))
    past = Past(_rings(storage, settings, x.shape[1], rings), num_steps, num_steps.is_cpu, nullcontext(), scratch)
    operands = [
        C.Operand(geometry, weight, y, x.shape[2:])
        for geometry, weight, y in zip(geometries, weights, inputs, strict=True)
    ]
    pooling = int(burnt) >= settings.burn_in
    today = StepInputs(x, None, True, operands, bias, is_complete, pooling, remember, None)
    try:
        outcome = ops.step(today, past, storage, settings)
    except NotTheOperatorsOutput:
        say("plain BatchNorm at a compiled step: a norm's input is not what the operator's weight makes of its input")
        outcome = ops.step(today._replace(operands=(), pooling=False, remember=False), past, storage, settings)
    results = _packed(outcome.statistics, _shapes(x.shape[1], storage, past.rings, settings, bias is not None))
    if outcome.commit is not None:
        outcome.commit()
    return results


def _run_fake(
    x: Tensor,
    _: list[Tensor | None],
    __: list[Tensor],
    bias: Tensor | None,
    rings: list[Tensor],
    ___: Tensor,
    ____: Tensor,
    numbers: list[int],
    decay: float,
    *_____: Any,
) -> Tensor:
    settings, _geometries, storage = _meaning(tuple(numbers), decay)
    by_name = _rings(storage, settings, x.shape[1], rings)
    shapes = _shapes(x.shape[1], storage, by_name, settings, bias is not None)
    return x.new_empty(sum(map(math.prod, shapes)), dtype=C.accumulation_dtype(x.dtype))


def _shapes(
    channels: int, storage: C.Storage | None, rings: dict[str, Tensor], settings: Settings, has_bias: bool
) -> list[tuple[int, ...]]:
    """Return the shapes of the results: mean, var, share, bessel, has_variance, positions, finite, and dependence."""
    wide, slots = channels if settings.invalid == "drop" else 1, rings["mean"].shape[0]
    shapes: list[tuple[int, ...]] = [(channels,), (channels,), (wide,), (channels,), (channels,), (), ()]
    if storage is None or slots == 0 or settings.backward == "detached":
        return shapes
    shapes += [(slots, channels), *[(channels,)] * (2 * has_bias), (slots, wide)]
    amount = rings["products"].shape[1] if "products" in rings else 1
    for geometry in storage.geometries:
        rest = (channels, geometry.patch_size) if isinstance(storage, C.GradientStorage) else (0,)
        shapes += [(slots, amount, geometry.groups, geometry.patch_size), (slots, amount, channels), rest]
    return shapes


def _packed(found: Statistics, shapes: list[tuple[int, ...]]) -> Tensor:
    """Return the results as one tensor, with 0 for steps that are missing."""
    tensors: list[Any] = [found.mean, found.var, found.share, found.bessel]
    tensors += [found.has_variance, found.positions, found.finite]
    if (dependence := found.dependence) is not None:
        tensors += [dependence.dvar_dvar, *(dependence.of_bias or ()), dependence.jacobians[0].mean_coefficient]
        tensors += [each for rows, _, of_var, rest in dependence.jacobians for each in (rows, of_var, rest)]
    packed = found.mean.new_zeros(sum(map(math.prod, shapes)))
    for part, shape, tensor in zip(packed.split(list(map(math.prod, shapes))), shapes, tensors, strict=False):
        if tensor is not None:
            whole = part.view(shape)
            (whole[: len(tensor)] if len(shape) > 1 else whole).copy_(torch.as_tensor(tensor, dtype=packed.dtype))
    return packed


def _statistics(results: list[Tensor], settings: Settings, operators: int, has_bias: bool) -> Statistics:
    """Return what `_packed` took apart."""
    mean, var, share, bessel, has_variance, positions, finite, *rest = results
    dependence = None
    if rest:
        tensors = iter(rest)
        dvar_dvar = next(tensors)
        of_bias = (next(tensors), next(tensors)) if has_bias else None
        weight = next(tensors)
        jacobians = []
        for _ in range(operators):
            rows, of_var, of_rest = next(tensors), next(tensors), next(tensors)
            jacobians.append(C.Jacobian(rows, weight, of_var, of_rest if of_rest.ndim == 2 else None))
        dependence = C.Dependence(tuple(jacobians), dvar_dvar, of_bias, settings.order == 2, not settings.sync)
    return Statistics(mean, var, share, dependence, bessel, has_variance != 0, positions, finite != 0)


torch.library.impl("crossbn::step", "CompositeExplicitAutograd", _run)
torch.library.register_fake("crossbn::step", _run_fake)
