"""The operations of a training step in compiled code, on the CPU, see `csrc/`; none of them is needed.

Each returns None, and nothing has happened, where the case is another: `reference.py` then does it.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from crossbn.functional import (
    Dependence,
    Geometry,
    Gradients,
    GradientStorage,
    Jacobian,
    Settings,
    Storage,
    flatten_weight,
    weights_by_age,
)
from crossbn.functional.moments import is_differentiated
from crossbn.ops import library
from crossbn.ops.library import Unfit, address
from crossbn.ops.tables import Tables
from crossbn.ops.types import NormTensors, NotTheOperatorsOutput, Outcome, Past, Statistics, StepInputs

_MOST_STEPS = 63
_NOT_FINITE, _DONE, _NOT_REMEMBERED, _NOT_THE_OPERATOR = range(4)  # what a step came to, see `csrc/library.c`
_RINGS_OF_PATCHES = {"rows": "0.rows", "at": "products", "centred": "centred"}
_RINGS_OF_GRADIENTS = {"rows": "0.mean_grad", "at": "mean_at", "var_grad": "0.var_grad", "var_at": "var_at"}
"""Where compiled code finds what the two storages keep."""


def moments(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return mean and biased variance of `x` [N, C, ...] per channel, unless a derivative is to be taken of them."""
    if not library.in_use(x) or is_differentiated(x):
        return None
    try:
        place = address(x, x.dtype, x.shape, dense=False)
    except Unfit:
        return None
    mean, var = x.new_empty(2, x.shape[1]).unbind()
    function = library.functions[x.dtype]["moments"]
    function(place, *_extent(x), x.stride(0), mean.data_ptr(), var.data_ptr(), torch.get_num_threads())
    return mean, var


def _extent(x: Tensor) -> tuple[int, int, int]:
    """Return images, channels and positions of an image."""
    batch, channels, *space = x.shape
    return batch, channels, math.prod(space)


def take_over(mean: Tensor, var: Tensor, running: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Let running mean and variance be `mean` and `var`, and count a step, if they are finite."""
    if not library.in_use(mean):
        return False
    try:
        places = [address(each, mean.dtype, mean.shape) for each in (mean, var, *running[:2])]
        places.append(address(running[2], torch.int64, ()))
    except Unfit:
        return False
    if library.functions[mean.dtype]["take_over"](len(mean), *places):
        torch.autograd.graph.increment_version(running)
    return True


def step_backward(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, share: Tensor, gamma: Tensor, eps: float
) -> Gradients | None:
    """Return the gradients of the normalization, from that of the output."""
    if not library.in_use(x):
        return None
    vector, channels = (x.shape[1],), x.shape[1]
    try:
        grad, x = grad.contiguous(), x.contiguous()
        tensors = address(grad, x.dtype, x.shape), address(x, x.dtype, x.shape)
        statistics = address(mean, x.dtype, vector), address(var, x.dtype, vector)
        shares = address(share, x.dtype, share.shape)
        scale = address(gamma, x.dtype, vector)
    except Unfit:
        return None
    dx, (of_gamma, of_beta, of_mean, of_var) = torch.empty_like(x), x.new_empty(4, channels).unbind()
    library.functions[x.dtype]["step_backward"](
        *(*tensors, *_extent(x), *statistics, eps, shares, int(share.numel() > 1), scale),
        *(each.data_ptr() for each in (dx, of_gamma, of_beta, of_mean, of_var)),
        torch.get_num_threads(),
    )
    return Gradients(dx, of_gamma, of_beta, of_mean, of_var)


def weight_gradient(jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> Tensor | None:
    """Return dL/dW [C, I] from a = dL/dmean and v = dL/dvar [C]."""
    if not library.in_use(grad_mean):
        return None
    rows, of_mean, of_var, rest = jacobian
    (steps, amount, groups, size), channels, dtype = rows.shape, len(grad_mean), grad_mean.dtype
    try:
        places = address(rows, dtype, rows.shape), address(of_var, dtype, (steps, amount, channels))
        sides = [address(rest, dtype, (channels, size))]
        sides += [address(each, dtype, (channels,)) for each in (grad_mean, grad_var)]
        if of_mean.dtype is not dtype or not of_mean.is_cpu:
            raise Unfit
    except Unfit:
        return None
    channel_stride = of_mean.stride(1) if of_mean.shape[1] > 1 else 0
    grad, scratch = grad_var.new_empty(channels, size), torch.empty_like(of_var)
    library.functions[dtype]["weight_gradient"](
        *(steps, amount, channels, groups, size, *places, of_mean.data_ptr(), of_mean.stride(0), channel_stride),
        *(*sides, scratch.data_ptr(), grad.data_ptr(), torch.get_num_threads()),
    )
    return grad


def step(inputs: StepInputs, past: Past, storage: Storage | None, settings: Settings) -> Outcome | None:
    """Do a whole step in the usual case: one operator, nothing added to it, first order, one process.

    Raises:
        NotTheOperatorsOutput: if the input is not what the operator makes of its own.
    """
    if storage is None or not _is_usual(inputs, past, storage, settings):
        return None
    try:
        return _step(inputs, past, storage, settings)
    except Unfit:
        return None


def _is_usual(inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> bool:
    x, positions = inputs.x, inputs.x.numel() // inputs.x.shape[1]
    if len(inputs.operands) != 1 or not inputs.is_complete or inputs.bias is not None or not library.in_use(x):
        return False
    if inputs.pooling is not True or not past.is_readable or not 0 < past.slots <= _MOST_STEPS:
        return False
    if inputs.moments is None:
        # Then the norm's own tensors are needed. A lone position is centred first, which the reference does.
        if inputs.norm is None or positions == 1:
            return False
    elif inputs.finite is not True:
        return False
    if settings.order != 1 or settings.invalid != "max" or settings.backward != "through" or settings.sync:
        return False
    operand = inputs.operands[0]
    if operand.y is None or storage.positions is None or settings.history_dtype is not None:
        return False
    return x.shape[2:] == operand.output_sizes and len(operand.y) == len(x)


class _Workspace:
    """What a step needs and the next one can use again: structures, tables, room. It belongs to one step at a time."""

    def __init__(self, geometry: Geometry, y: Tensor, x: Tensor, storage: Storage) -> None:
        assert storage.positions is not None
        self.tables = Tables(geometry, y, x, storage.positions)
        self.of_gradients = isinstance(storage, GradientStorage)
        self.rings = _RINGS_OF_GRADIENTS if self.of_gradients else _RINGS_OF_PATCHES
        self.threads = torch.get_num_threads()
        self._room = y.new_empty(self.tables.room(self.of_gradients))
        groups, size, channels, amount = geometry.groups, geometry.patch_size, x.shape[1], 1 + self.tables.amount
        self.row_shapes: list[tuple[int, ...]] = [(amount, groups, size), (amount, channels), (amount, channels)]
        if self.of_gradients:
            self.row_shapes = [(groups, size), (channels,), (channels, size), (channels,)]
        self.batch: Any = library.structures["batch", x.dtype]()
        self.memory: Any = library.structures["memory", x.dtype]()
        self.memory.groups, self.memory.i, self.memory.scratch = groups, size, self._room.data_ptr()

    def fits(self, geometry: Geometry, y: Tensor, x: Tensor) -> bool:
        return self.tables.key == Tables.key_of(geometry, y, x) and self.threads == torch.get_num_threads()


def _workspace(past: Past, geometry: Geometry, y: Tensor, x: Tensor, storage: Storage) -> _Workspace:
    """Return one that no other step has, for this step to have."""
    try:
        work: _Workspace = past.scratch.pop()  # one operation: no other thread gets the same
        if work.fits(geometry, y, x):
            return work
    except IndexError:
        pass
    if not Tables.has_room(geometry, x):
        raise Unfit
    return _Workspace(geometry, y, x, storage)


def _step(inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> Outcome | None:
    x, (operand,), positions = inputs.x, inputs.operands, inputs.x.numel() // inputs.x.shape[1]
    assert operand.y is not None
    num_steps = int(past.num_steps)
    steps, rings = min(num_steps, past.slots), past.rings
    step_weights = weights_by_age(steps, num_steps % past.slots, settings.decay, x.dtype, x.device)
    counted = sum(rings["count"].tolist()) + positions
    bessel = counted / (counted - 1) if counted > 1 else 1.0
    # All that can be refused is looked at before a workspace is taken.
    places = _places(inputs, past, storage)
    work = _workspace(past, operand.geometry, operand.y, x, storage)
    today_mean, today_var, mean, var = x.new_empty(4, x.shape[1]).unbind()
    if inputs.moments is not None:
        today_mean, today_var = inputs.moments
    output = None if inputs.moments is not None else x.new_empty(x.shape)
    batch, memory = work.batch, work.memory
    for structure, fields in zip((batch, memory), places, strict=True):
        for name, value in fields.items():
            setattr(structure, name, value)
    batch.n, batch.c, batch.s = _extent(x)
    batch.x_stride, batch.has_moments, batch.bessel = x.stride(0), inputs.moments is not None, bessel
    batch.step_weights = None if step_weights.relative is None else step_weights.relative.data_ptr()
    batch.today_mean, batch.today_var = today_mean.data_ptr(), today_var.data_ptr()
    batch.mean, batch.var = mean.data_ptr(), var.data_ptr()
    batch.output = None if output is None else output.data_ptr()
    memory.r, memory.start, memory.y_stride = steps, work.tables.start(num_steps), operand.y.stride(0)
    jacobian, dvar_dvar = _jacobian(work, steps, rings, x, step_weights.weight)
    row = None
    if inputs.remember:
        row = dict(zip(work.rings.values(), (x.new_empty(shape) for shape in work.row_shapes), strict=True))
    for field, name in work.rings.items():
        setattr(memory, f"next_{field}", None if row is None else row[name].data_ptr())
    references = ctypes.byref(batch), ctypes.byref(memory), ctypes.byref(work.tables.structure)
    came_to = library.functions[x.dtype]["step"](*references, work.threads)
    past.scratch.append(work)
    if came_to == _NOT_FINITE:
        return None
    if came_to == _NOT_THE_OPERATOR:
        raise NotTheOperatorsOutput
    if inputs.norm is not None and output is not None:
        torch.autograd.graph.increment_version(inputs.norm[:3])
    if row is not None and came_to == _DONE:
        row |= {"mean": today_mean, "var": today_var, "count": _number(positions, x.dtype)}
    else:
        row = None
    dependence = Dependence((jacobian,), dvar_dvar, None, False, True) if steps else None
    found = Statistics(mean, var, step_weights.share, bessel, counted > 1, positions, True, dependence)
    return Outcome(found, row, True, output)


def _places(
    inputs: StepInputs, past: Past, storage: Storage
) -> tuple[dict[str, float | int | None], dict[str, float | int | None]]:
    """Return where everything is that the structures `batch` and `memory` have to point at, after looking at it."""
    x, operand, dtype = inputs.x, inputs.operands[0], inputs.x.dtype
    y, geometry, vector = operand.y, operand.geometry, (inputs.x.shape[1],)
    assert y is not None
    weight = operand.weight
    if geometry.transposed:
        weight = flatten_weight(weight.detach(), geometry)
    batch: dict[str, float | int | None] = {"x": address(x, dtype, x.shape, dense=False), "running_mean": None}
    if inputs.moments is None and inputs.norm is not None:
        batch |= _places_of_norm(inputs.norm, dtype, vector)
    elif inputs.moments is not None:
        for moment in inputs.moments:
            address(moment, dtype, vector)
    if weight.numel() != geometry.out_channels * geometry.patch_size:
        raise Unfit
    memory: dict[str, float | int | None] = {"weight": address(weight, dtype, weight.shape)}
    memory["y"] = address(y, dtype, y.shape, dense=False)
    names = _RINGS_OF_GRADIENTS if isinstance(storage, GradientStorage) else _RINGS_OF_PATCHES
    for field, name in {"mean": "mean", "var": "var", **names}.items():
        ring = past.rings[name]
        memory[field] = address(ring, dtype, ring.shape)
    return batch, memory


def _places_of_norm(norm: NormTensors, dtype: torch.dtype, vector: tuple[int, ...]) -> dict[str, float | int | None]:
    return {
        "running_mean": address(norm.running_mean, dtype, vector),
        "running_var": address(norm.running_var, dtype, vector),
        "num_batches_tracked": address(norm.num_batches_tracked, torch.int64, ()),
        "gamma": address(norm.gamma, dtype, vector),
        "beta": address(norm.beta, dtype, vector),
        "eps": norm.eps,
        "momentum": norm.momentum,
    }


def _jacobian(
    work: _Workspace, steps: int, rings: dict[str, Tensor], x: Tensor, of_mean: Tensor
) -> tuple[Jacobian, Tensor]:
    """Return how the pooled moments will follow the weight, and d var / d past var: to be filled by the step."""
    memory, channels = work.memory, x.shape[1]
    amount = 1 if work.of_gradients else rings["0.rows"].shape[1]
    rows = x.new_empty(steps, amount, memory.groups, memory.i)
    coefficient, dvar_dvar = x.new_empty(steps, amount, channels), x.new_empty(steps, channels)
    rest = x.new_empty(channels, memory.i) if work.of_gradients else None
    memory.m, memory.kept_rows = amount, rows.data_ptr()
    memory.var_coefficient, memory.dvar_dvar = coefficient.data_ptr(), dvar_dvar.data_ptr()
    memory.var_jacobian = None if rest is None else rest.data_ptr()
    return Jacobian(rows, of_mean, coefficient, rest), dvar_dvar


@functools.lru_cache(256)
def _number(value: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # it is kept, and used in training as well
        return torch.tensor(float(value), dtype=dtype, device="cpu")
