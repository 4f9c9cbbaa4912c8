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
from crossbn.functional.settings import CHOICES
from crossbn.messages import say
from crossbn.ops import types
from crossbn.ops.types import NotTheOperatorsOutput, Past, Statistics, StepInputs
from crossbn.torch_internals import assume_constant_result, process_group_called

_COUNTS = ("window", "burn_in", "positions")
_ANY_LAYOUT = (torch.Tag.flexible_layout,)  # else a graph copies what its convolutions have in channels_last

torch.library.define(
    "crossbn::step",
    "(Tensor x, Tensor?[] inputs, Tensor[] weights, Tensor? bias, Tensor(a!)[] rings, Tensor(b!) num_steps, "
    "Tensor burnt, Tensor(c!)[] running, int[] numbers, float decay, str group, float momentum, bool is_complete, "
    "bool remember) -> Tensor",
    tags=_ANY_LAYOUT,
)
torch.library.define(
    "crossbn::step_backward",
    "(Tensor grad, Tensor x, Tensor gamma, Tensor mean, Tensor var, Tensor share, float eps, Tensor?[] jacobians, "
    "int[] places) -> Tensor[]",
    tags=_ANY_LAYOUT,
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
    norm: types.NormTensors | None,
) -> Statistics:
    """Do a step and remember it; the running statistics of `norm` move. `burnt` says how much of burn-in is over."""
    inputs, weights = [operand.y for operand in operands], [operand.weight.detach() for operand in operands]
    numbers = _numbers(settings, [operand.geometry for operand in operands])
    group = settings.process_group.group_name if settings.process_group is not None else ""
    history = list(past.rings.values()), past.num_steps, burnt, [] if norm is None else list(norm[:3])
    options = numbers, settings.rate, group, 0.0 if norm is None else norm.momentum, is_complete, remember
    found = torch.ops.crossbn.step(x, inputs, weights, bias, *history, *options)
    results = _parts(found, _shapes(storage, past.rings, settings, bias is not None))
    bessel, has_variance, positions, finite, shift, growth, noise, mean, var, share, *rest = results
    dependence = None
    if rest:
        dependence = C.Dependence.of_tensors(iter(rest), len(operands), settings.order == 2, not settings.sync)
    latest = None if settings.prior is None else C.Latest(shift, growth, noise)  # type: ignore[arg-type]  # these are there
    together: Any = (mean, var, share, dependence, bessel, has_variance != 0, positions, finite != 0, latest)
    return Statistics(*together)


def _numbers(settings: Settings, geometries: Sequence[C.Geometry]) -> list[int]:
    counts = [getattr(settings, name) for name in _COUNTS]
    numbers = [-1 if count is None else count for count in counts]
    numbers += [choices.index(getattr(settings, name)) for name, choices in CHOICES.items()]
    for geometry in geometries:
        numbers += geometry.numbers()
    return numbers


@functools.lru_cache(4096)
def _meaning(numbers: tuple[int, ...], operators: int, decay: float) -> tuple[Settings, C.Storage | None]:
    """Return settings and storage from what `_numbers` made of them."""
    left = iter(numbers)
    options: dict[str, Any] = {name: None if (count := next(left)) < 0 else count for name in _COUNTS}
    options |= {name: choices[next(left)] for name, choices in CHOICES.items()}
    settings, geometries = Settings(**options, decay=decay), [C.Geometry.from_numbers(left) for _ in range(operators)]
    return settings, C.make_storage(geometries, settings)


@functools.lru_cache(1024)
def _scratch(*_: Any) -> list[Any]:
    """Return what implementations keep between steps of one operator at one size, for rings at the same addresses."""
    return []


def _run(
    x: Tensor,
    inputs: list[Tensor | None],
    weights: list[Tensor],
    bias: Tensor | None,
    rings: list[Tensor],
    num_steps: Tensor,
    burnt: Tensor,
    running: list[Tensor],
    numbers: list[int],
    decay: float,
    group: str,
    momentum: float,
    is_complete: bool,
    remember: bool,
) -> Tensor:
    settings, storage = _meaning(tuple(numbers), len(weights), decay)
    if group:
        settings = replace(settings, process_group=process_group_called(group))
    by_name = dict(zip(C.history_shapes(x.shape[1], storage, settings), rings, strict=True))
    scratch = _scratch(tuple(numbers), x.shape, x.dtype, *(ring.data_ptr() for ring in rings))
    past = Past(by_name, num_steps, num_steps.is_cpu, nullcontext(), scratch)
    geometries = () if storage is None else storage.geometries
    operands = [C.Operand(*each, x.shape[2:]) for each in zip(geometries, weights, inputs, strict=True)]
    pooling = int(burnt) >= settings.burn_in
    today = StepInputs(x, None, True, operands, bias, is_complete, pooling, remember, None)
    try:
        found, commit, *_ = ops.step(today, past, storage, settings)
    except NotTheOperatorsOutput:
        say("plain BatchNorm at a compiled step: a norm's input is not what the operator's weight makes of its input")
        today = today._replace(operands=(), pooling=False, remember=False)
        found, commit, *_ = ops.step(today, past, storage, settings)
    shapes = _shapes(storage, by_name, settings, bias is not None)
    latest: Sequence[Any] = (None,) * 3
    if settings.prior is not None:
        latest = found.latest or (0.0, 0.0, 0.0)  # nothing has moved
    tensors = [found.bessel, found.has_variance, found.positions, found.finite, *latest]
    tensors += [found.mean, found.var, found.share]
    tensors += found.dependence.tensors() if found.dependence is not None else []
    packed = _packed(tensors, shapes, found.mean)
    if commit is not None:
        commit()
    if running:
        ops.move_running(found, (running[0], running[1], running[2]), momentum)
    return packed


def _packed(tensors: Sequence[Any], shapes: types.Shapes, like: Tensor) -> Tensor:
    """Return tensors and numbers in one tensor, as of these shapes; what is not there is 0, as is what lies between."""
    starts = types.starts_in_one(shapes)
    packed = like.new_empty(starts[-1])
    for i, shape in enumerate(shapes):
        value, whole = tensors[i] if i < len(tensors) else None, packed[starts[i] : starts[i + 1]]
        if shape is None:
            continue
        if not isinstance(value, Tensor) or value.ndim == 0:
            whole.fill_(0.0 if value is None else value)
            continue
        if len(shape) == 1:  # one number may stand for all channels, and one for each of them for one
            value = value[: shape[0]].expand(shape)
        whole[: value.numel()].view(value.shape).copy_(value)
        if value.numel() < len(whole):
            whole[value.numel() :].zero_()
    return packed


def _run_fake(x: Tensor, _: Any, weights: list[Tensor], bias: Tensor | None, rings: list[Tensor], *rest: Any) -> Tensor:
    _, _, _, numbers, decay, *_ = rest
    settings, storage = _meaning(tuple(numbers), len(weights), decay)
    by_name = dict(zip(C.history_shapes(x.shape[1], storage, settings), rings, strict=True))
    size = types.starts_in_one(_shapes(storage, by_name, settings, bias is not None))[-1]
    return x.new_empty(size, dtype=C.accumulation_dtype(x.dtype))


def _shapes(storage: C.Storage | None, rings: dict[str, Tensor], settings: Settings, has_bias: bool) -> types.Shapes:
    """Return the shapes of the results: four flags and counts, the latest step, mean, var, share, and dependence."""
    slots, channels = rings["mean"].shape
    followed = storage if settings.backward == "through" else None
    shapes = types.result_shapes(followed, rings, slots, channels if settings.invalid == "drop" else 1, has_bias)
    latest: types.Shapes = [None] * 3 if settings.prior is None else [(channels,), (channels,), ()]
    return [(channels,), (channels,), (), (), *latest, *shapes]


def _parts(packed: Tensor, shapes: types.Shapes) -> list[Tensor | None]:
    """Return the tensors of these shapes that lie in `packed`, in a way that every torch can trace; None for None."""
    return [
        None if shape is None else packed[start : start + math.prod(shape)].view(shape)
        for shape, start in zip(shapes, types.starts_in_one(shapes)[:-1], strict=True)
    ]


def step_backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor,
    eps: float,
    statistics: Statistics,
    jacobians: Sequence[tuple[int, C.Jacobian]],
) -> C.Gradients:
    """Return what `ops.step_backward` does, as one operator."""
    rest = statistics.mean, statistics.var, statistics.share, eps, *_flat(jacobians)
    dx, dgamma, dbeta, a, v, *weights = torch.ops.crossbn.step_backward(grad, x, gamma, *rest)
    return C.Gradients(dx, dgamma, dbeta, a, v, weights)


def _flat(jacobians: Sequence[tuple[int, C.Jacobian]]) -> tuple[list[Tensor | None], list[int]]:
    """Return their tensors, then where each of them starts and how many groups it has.

    What has four axes a compiler keeps in channels_last order, in which no kernel reads rows.
    """
    tensors = [tensor for _, each in jacobians for tensor in each._replace(rows=each.rows.flatten(2))]
    return tensors, [number for start, each in jacobians for number in (start, each.rows.shape[2])]


def _jacobians(tensors: list[Tensor | None], places: list[int]) -> list[tuple[int, C.Jacobian]]:
    width, found = len(C.Jacobian._fields), []
    for i, (start, groups) in enumerate(zip(places[::2], places[1::2], strict=True)):
        given = C.Jacobian(*tensors[width * i : width * (i + 1)])  # type: ignore[arg-type]  # as it was
        found.append((start, given._replace(rows=given.rows.unflatten(2, (groups, -1)))))
    return found


def _run_backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    eps: float,
    jacobians: list[Tensor | None],
    places: list[int],
) -> list[Tensor]:
    statistics = Statistics(mean, var, share, None)
    dx, dgamma, dbeta, *rest, weights = ops.step_backward(
        grad, x, gamma, eps, statistics, _jacobians(jacobians, places)
    )
    laid_out = torch.empty_like(x)  # as the graph expects it
    dx = dx if dx.stride() == laid_out.stride() else laid_out.copy_(dx)
    own = [dx, dgamma, dbeta, *rest, *weights]
    return [each.clone() if each._is_view() else each for each in own]  # results of an operator lie apart


def _run_backward_fake(
    _: Tensor, x: Tensor, __: Tensor, mean: Tensor, ___: Tensor, ____: Tensor, _____: float, *rest: Any
) -> list[Tensor]:
    weights = [each.rows.new_empty(each.var_coefficient.shape[2], each.rows.shape[3]) for _, each in _jacobians(*rest)]
    return [torch.empty_like(x), *(torch.empty_like(mean) for _ in range(4)), *weights]


@assume_constant_result
def say_while_compiling(message: str) -> bool:
    """Warn when torch.compile comes by, which it cannot do in the graph itself."""
    say(message)
    return True


torch.library.impl("crossbn::step", "CompositeExplicitAutograd", _run)
torch.library.impl("crossbn::step_backward", "CompositeExplicitAutograd", _run_backward)
torch.library.register_fake("crossbn::step_backward", _run_backward_fake)
torch.library.register_fake("crossbn::step", _run_fake)
