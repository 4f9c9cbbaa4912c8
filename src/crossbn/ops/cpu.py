"""The operations of a training step in compiled code, on the CPU, see `csrc/`; none of them is needed.

Each returns None, and nothing has happened, where the case is another: `reference.py` then does it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import partial
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
    StepWeights,
    Storage,
    flatten_weight,
    weighting,
    weights_by_age,
)
from crossbn.functional.moments import is_differentiated
from crossbn.ops import library
from crossbn.ops.library import Unfit, address
from crossbn.ops.tables import Tables
from crossbn.ops.types import NotTheOperatorsOutput, Outcome, Past, Statistics, StepInputs

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
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    share: Tensor,
    gamma: Tensor,
    eps: float,
    jacobians: Sequence[tuple[int, Jacobian]],
) -> Gradients | None:
    """Return the gradients of the normalization, from that of the output, and those of the operators' weights."""
    if not library.in_use(x):
        return None
    grad, x, dtype, vector, threads = grad.contiguous(), x.contiguous(), x.dtype, x.shape[1:2], torch.get_num_threads()
    try:
        tensors = address(grad, dtype, x.shape), address(x, dtype, x.shape)
        statistics = address(mean, dtype, vector), address(var, dtype, vector)
        scales = address(share, dtype, share.shape), int(share.numel() > 1), address(gamma, dtype, vector)
        places = [_places(jacobian, dtype) for _, jacobian in jacobians]
    except Unfit:
        return None
    dx, sums = torch.empty_like(x), x.new_empty(4, *vector)
    rows = [sums.data_ptr() + i * vector[0] * sums.element_size() for i in range(4)]
    functions = library.functions[dtype]
    functions["step_backward"](*tensors, *_extent(x), *statistics, eps, *scales, dx.data_ptr(), *rows, threads)
    weights = []
    for (start, jacobian), (sizes, of_steps, rest) in zip(jacobians, places, strict=True):
        of_var, offset = jacobian.var_coefficient, start * sums.element_size()
        weight, scratch = x.new_empty(sizes[2], sizes[4]), torch.empty_like(of_var)
        vectors = rows[2] + offset, rows[3] + offset, scratch.data_ptr()
        functions["weight_gradient"](*sizes, *of_steps, rest, *vectors, True, weight.data_ptr(), threads)
        weights.append(weight)
    of_gamma, of_beta, of_mean, of_var = sums.unbind()
    return Gradients(dx, of_gamma, of_beta, of_mean, of_var, weights)


def add_weight_gradient_(grad: Tensor, jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> bool:
    """Add dL/dW to `grad`, from a = dL/dmean and v = dL/dvar [C]."""
    if not library.in_use(grad):
        return False
    dtype, scratch = grad.dtype, torch.empty_like(jacobian.var_coefficient)
    try:
        sizes, of_steps, rest = _places(jacobian, dtype)
        vectors = address(grad_mean, dtype, (sizes[2],)), address(grad_var, dtype, (sizes[2],)), scratch.data_ptr()
        place = address(grad, dtype, grad.shape)
    except Unfit:
        return False
    if grad.numel() != sizes[2] * sizes[4]:
        return False
    library.functions[dtype]["weight_gradient"](
        *sizes, *of_steps, rest, *vectors, False, place, torch.get_num_threads()
    )
    return True


def _places(jacobian: Jacobian, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int | None, ...], int | None]:
    """Return the sizes of a Jacobian, and where its tensors are, as compiled code is told of it."""
    rows, of_mean, of_var, rest = jacobian
    (steps, amount, groups, size), channels = rows.shape, of_var.shape[2]
    if of_mean.dtype is not dtype or not of_mean.is_cpu or of_mean.shape[0] != steps:
        raise Unfit
    channel_stride = of_mean.stride(1) if of_mean.shape[1] == channels > 1 else 0
    places = address(rows, dtype, rows.shape), address(of_var, dtype, (steps, amount, channels))
    strides = of_mean.data_ptr(), of_mean.stride(0), channel_stride
    return (steps, amount, channels, groups, size), (*places, *strides), address(rest, dtype, (channels, size))


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
    """What a step needs and the next one can use again: structures, tables, room, and a row to be remembered.

    It belongs to one step at a time, from its forward until it is remembered.
    """

    def __init__(self, geometry: Geometry, y: Tensor, x: Tensor, storage: Storage, past: Past) -> None:
        assert storage.positions is not None
        self.tables = Tables(geometry, y, x, storage.positions)
        self.of_gradients = isinstance(storage, GradientStorage)
        self.threads = torch.get_num_threads()
        names = _RINGS_OF_GRADIENTS if self.of_gradients else _RINGS_OF_PATCHES
        groups, size, channels, amount = geometry.groups, geometry.patch_size, x.shape[1], 1 + self.tables.amount
        shapes: list[tuple[int, ...]] = [(amount, groups, size), (amount, channels), (amount, channels)]
        if self.of_gradients:
            shapes = [(groups, size), (channels,), (channels, size), (channels,)]
        self.batch: Any = library.structures["batch", x.dtype]()
        self.memory: Any = library.structures["memory", x.dtype]()
        self.structures = ctypes.byref(self.batch), ctypes.byref(self.memory), ctypes.byref(self.tables.structure)
        self.today = x.new_empty(2, channels).unbind()
        self._row = {f"next_{field}": x.new_empty(shape) for field, shape in zip(names, shapes, strict=True)}
        self._row_addresses = [(field, tensor.data_ptr()) for field, tensor in self._row.items()]
        self._room = y.new_empty(self.tables.room(self.of_gradients))
        self._rings = dict(past.rings)  # as long as addresses are kept, the tensors are
        for field, name in {"mean": "mean", "var": "var", "count": "count", **names}.items():
            setattr(self.memory, field, address(past.rings[name], x.dtype, past.rings[name].shape))
        self.memory.num_steps = address(past.num_steps, torch.int64, ())
        self.rows_shape = (1 if self.of_gradients else past.rings["0.rows"].shape[1], groups, size)
        self.memory.m, self.memory.groups, self.memory.i = self.rows_shape
        self.memory.scratch = self._room.data_ptr()
        if "variogram" in past.rings:
            self._weigh_in(past.rings["variogram"], channels)

    def _weigh_in(self, variogram: Tensor, channels: int) -> None:
        """Let steps find their weights from the variogram, and the next variogram."""
        memory, slots = self.memory, len(variogram)
        self._step_weights, self._next, self._differences = (variogram.new_zeros(n, slots) for n in (1, 1, channels))
        memory.variogram = address(variogram, variogram.dtype, (slots,))
        memory.next_variogram, memory.differences = self._next.data_ptr(), self._differences.data_ptr()
        memory.slots, memory.price, memory.rate = slots, weighting.GRADIENT_PRICE, weighting.AVERAGING_RATE

    def weigh(self, steps: int, num_steps: int) -> StepWeights:
        """Let the step find its weights; return them, without values yet."""
        like, memory = self._step_weights, self.memory
        weight, share = like.new_empty(steps, 1), like.new_empty(1)
        memory.seen, memory.weight_of_step, memory.share = num_steps, weight.data_ptr(), share.data_ptr()
        return StepWeights(like, weight, share)

    def fits(self, geometry: Geometry, y: Tensor, x: Tensor) -> bool:
        return self.tables.key == Tables.key_of(geometry, y, x) and self.threads == torch.get_num_threads()

    def make_row(self, wanted: bool) -> None:
        for field, place in self._row_addresses:
            setattr(self.memory, field, place if wanted else None)


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
    return _Workspace(geometry, y, x, storage, past)


def _step(inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> Outcome | None:
    x, (operand,), positions = inputs.x, inputs.operands, inputs.x.numel() // inputs.x.shape[1]
    assert operand.y is not None
    num_steps = int(past.num_steps)
    steps = min(num_steps, past.slots)
    counted = sum(past.rings["count"].tolist()) + positions
    bessel = counted / (counted - 1) if counted > 1 else 1.0
    # All that can be refused is looked at before a workspace is taken. Rows of a weight live as long as their address.
    dtype, vector, geometry, norm = x.dtype, x.shape[1:2], operand.geometry, inputs.norm
    weight = flatten_weight(operand.weight.detach(), geometry) if geometry.transposed else operand.weight
    if weight.numel() != geometry.out_channels * geometry.patch_size:
        raise Unfit
    x_place, y_place = address(x, dtype, x.shape, dense=False), address(operand.y, dtype, operand.y.shape, dense=False)
    weight_place = address(weight, dtype, weight.shape)
    gamma = beta = running_mean = running_var = tracked = None
    if inputs.moments is not None:
        address(inputs.moments[0], dtype, vector), address(inputs.moments[1], dtype, vector)
    elif norm is not None:
        gamma, beta = address(norm.gamma, dtype, vector), address(norm.beta, dtype, vector)
        running_mean, running_var = address(norm.running_mean, dtype, vector), address(norm.running_var, dtype, vector)
        tracked = address(norm.num_batches_tracked, torch.int64, ())
    work = _workspace(past, geometry, operand.y, x, storage)
    batch, memory = work.batch, work.memory
    if settings.weights == "auto":
        step_weights = work.weigh(steps, num_steps)
    else:
        step_weights = weights_by_age(steps, num_steps % past.slots, settings.rate, x.dtype, x.device)
    batch.x, memory.y, memory.weight, batch.gamma, batch.beta = x_place, y_place, weight_place, gamma, beta
    batch.running_mean, batch.running_var, batch.num_batches_tracked = running_mean, running_var, tracked
    if norm is not None:
        batch.eps, batch.momentum = norm.eps, norm.momentum
    today = work.today if inputs.moments is None else inputs.moments
    output = torch.empty_like(x, memory_format=torch.contiguous_format) if inputs.moments is None else None
    mean, var = x.new_empty(2, x.shape[1]).unbind()
    batch.n, batch.c, batch.s = _extent(x)
    batch.x_stride, batch.has_moments, batch.bessel = x.stride(0), output is None, bessel
    batch.output = None if output is None else output.data_ptr()
    batch.step_weights = None if step_weights.relative is None else step_weights.relative.data_ptr()
    batch.today_mean, batch.today_var = today[0].data_ptr(), today[1].data_ptr()
    batch.mean, batch.var = mean.data_ptr(), var.data_ptr()
    memory.r, memory.start, memory.y_stride = steps, work.tables.start(num_steps), operand.y.stride(0)
    dependence = _dependence(work, steps, x, step_weights.weight)
    work.make_row(inputs.remember)
    came_to = library.functions[x.dtype]["step"](*work.structures, work.threads)
    commit = None
    if inputs.remember and came_to == _DONE:
        commit = partial(_remember, work, past, today)
    else:
        past.scratch.append(work)
    if came_to == _NOT_FINITE:
        return None
    if came_to == _NOT_THE_OPERATOR:
        raise NotTheOperatorsOutput
    if inputs.norm is not None and output is not None:
        torch.autograd.graph.increment_version(inputs.norm[:3])
    found = Statistics(mean, var, step_weights.share, bessel, counted > 1, positions, True, dependence)
    return Outcome(found, commit, output)


def _remember(work: _Workspace, past: Past, today: Sequence[Tensor]) -> None:
    """Write what the step has made into the rings. `today` are its moments, which must live until then."""
    with past.lock:
        slot = int(past.num_steps) % past.slots
        library.functions[today[0].dtype]["remember"](*work.structures, slot)
    past.scratch.append(work)


def _dependence(work: _Workspace, steps: int, x: Tensor, of_mean: Tensor) -> Dependence | None:
    """Return how the pooled moments will follow the weight: to be filled by the step."""
    memory, channels = work.memory, x.shape[1]
    if not steps:
        return None
    amount, groups, size = work.rows_shape
    rows, coefficient = x.new_empty(steps, amount, groups, size), x.new_empty(steps, amount, channels)
    dvar_dvar, rest = x.new_empty(steps, channels), x.new_empty(channels, size) if work.of_gradients else None
    memory.kept_rows = rows.data_ptr()
    memory.var_coefficient, memory.dvar_dvar = coefficient.data_ptr(), dvar_dvar.data_ptr()
    memory.var_jacobian = None if rest is None else rest.data_ptr()
    return Dependence((Jacobian(rows, of_mean, coefficient, rest),), dvar_dvar, None, False, True)
