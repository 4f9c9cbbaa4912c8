"""The operations of a training step in compiled code, on the CPU, see `csrc/`; none of them is needed.

Each returns None, and nothing has happened, where the case is another: `reference.py` then does it. Nothing reaches
compiled code but what `library.address` has looked at.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Gradients, Jacobian, Settings, Storage, weighting
from crossbn.functional.moments import is_differentiated
from crossbn.ops import library, types
from crossbn.ops.library import Unfit, address
from crossbn.ops.tables import Tables
from crossbn.ops.types import NotTheOperatorsOutput, Outcome, PackedStatistics, Past, Statistics, StepInputs

_MOST_STEPS = 63
_NOT_FINITE, _DONE, _NOT_REMEMBERED, _NOT_THE_OPERATOR = range(4)  # what a step came to, see `csrc/library.c`
_FIELDS = {"0.rows": "rows", "products": "at", "0.mean_grad": "rows", "mean_at": "at", "0.var_grad": "var_grad"}
"""What compiled code calls the rings that have another name there."""


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
    function(place, *_extent(x.shape), x.stride(0), mean.data_ptr(), var.data_ptr(), torch.get_num_threads())
    return mean, var


def _extent(shape: torch.Size) -> tuple[int, int, int]:
    """Return images, channels and positions of an image."""
    return shape[0], shape[1], math.prod(shape[2:])


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
    gamma: Tensor | None,
    eps: float,
    statistics: Statistics,
    jacobians: Sequence[tuple[int, Jacobian]] | None,
) -> Gradients | None:
    """Return the gradients of the normalization and of the operators' weights."""
    if not library.in_use(x):
        return None
    grad, x, dtype, c = grad.contiguous(), x.contiguous(), x.dtype, x.shape[1]
    new, functions, threads = x.new_empty, library.functions[dtype], torch.get_num_threads()
    try:
        places = address(grad, dtype, x.shape), address(x, dtype, x.shape), address(gamma, dtype, (c,))
        if isinstance(statistics, PackedStatistics):
            extent: _Extent = statistics.layout.own
            packed = address(statistics.packed, dtype, (statistics.layout.size,))
            if x.shape != extent.shape:
                return None
        else:
            mean, var, share = statistics.mean, statistics.var, statistics.share
            pooled = address(mean, dtype, (c,)), address(var, dtype, (c,))
            shares = address(share, dtype, (c if len(share) > 1 else 1,)), int(len(share) > 1)
    except Unfit:
        return None
    dx, of_gamma, of_beta, of_mean, of_var = torch.empty_like(x), new(c), new(c), new(c), new(c)
    vectors = of_gamma.data_ptr(), of_beta.data_ptr(), of_mean.data_ptr(), of_var.data_ptr()
    found = Gradients(dx, of_gamma, of_beta, of_mean, of_var, [])
    of_weight: tuple[int | None, ...] = None, None
    if not isinstance(statistics, PackedStatistics):
        sizes = ctypes.byref(library.structures["extent", None](*_extent(x.shape)))
        functions["step_backward"](sizes, eps, *places, *pooled, *shares, dx.data_ptr(), *vectors, threads)
    else:
        if jacobians is None:
            weight, scratch = new(extent.weight), new(extent.coefficients)
            of_weight = weight.data_ptr(), scratch.data_ptr()
            found.weights.append(weight)
        functions["backward_of"](extent.pointer, eps, *places, packed, dx.data_ptr(), *vectors, *of_weight, threads)
    for start, jacobian in jacobians or ():
        channels = jacobian.var_coefficient.shape[2]
        a, v = of_mean[start : start + channels], of_var[start : start + channels]
        weight = x.new_zeros(channels, jacobian.rows.shape[3])
        if not add_weight_gradient_(weight, jacobian, a, v):
            return None
        found.weights.append(weight)
    return found


def add_weight_gradient_(grad: Tensor, jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> bool:
    """Add dL/dW to `grad`, from a = dL/dmean and v = dL/dvar [C]."""
    if not library.in_use(grad):
        return False
    dtype, (_, _, channels), size = grad.dtype, jacobian.var_coefficient.shape, jacobian.rows.shape[3]
    scratch = torch.empty_like(jacobian.var_coefficient)
    try:
        places = _places(jacobian, dtype)
        vectors = address(grad_mean, dtype, (channels,)), address(grad_var, dtype, (channels,)), scratch.data_ptr()
        place = address(grad, dtype, grad.shape)
    except Unfit:
        return False
    if grad.numel() != channels * size:
        return False
    library.functions[dtype]["weight_gradient"](*places, *vectors, False, place, torch.get_num_threads())
    return True


def _places(jacobian: Jacobian, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the sizes of a Jacobian, and where its tensors are, as compiled code is told of it."""
    rows, of_mean, of_var, rest = jacobian
    (steps, amount, groups, size), channels = rows.shape, of_var.shape[2]
    if of_mean.dtype is not dtype or not of_mean.is_cpu or of_mean.shape not in ((steps, channels), (steps, 1)):
        raise Unfit
    extent = library.structures["extent", None](c=channels, r=steps, m=amount, groups=groups, i=size)
    strides = of_mean.stride(0), of_mean.stride(1) if of_mean.shape[1] == channels > 1 else 0
    places = address(of_var, dtype, (steps, amount, channels)), address(rest, dtype, (channels, size))
    return ctypes.byref(extent), address(rows, dtype, rows.shape), of_mean.data_ptr(), *strides, *places


def step(inputs: StepInputs, past: Past, storage: Storage | None, settings: Settings) -> Outcome | None:
    """Do a whole step in the usual case: one operator, nothing added to it, first order, one process.

    Raises:
        NotTheOperatorsOutput: if the input is not what the operator makes of its own.
    """
    if len(inputs.operands) != 1 or not inputs.is_complete or inputs.bias is not None or inputs.pooling is not True:
        return None
    if inputs.finite is not True or (inputs.moments is None and inputs.norm is None) or not library.in_use(inputs.x):
        return None
    work, outcome = _workspace(inputs, past, storage, settings), None
    if work is None:
        return None
    try:
        outcome = work.step(inputs, past)
    except Unfit:
        pass
    finally:
        if outcome is None or outcome.commit is None:  # else it is needed until then
            past.scratch.append(work)
    return outcome


def _workspace(inputs: StepInputs, past: Past, storage: Storage | None, settings: Settings) -> _Workspace | None:
    """Return one that no other step has, for this step to have."""
    if past.scratch:
        try:
            work: _Workspace = past.scratch.pop()  # one operation: no other thread gets the same
            if work.is_for(inputs, storage, settings):
                return work
        except IndexError:
            pass
    if settings.order != 1 or settings.invalid != "max" or settings.backward != "through" or settings.sync:
        return None
    if storage is None or isinstance(storage, C.ActivatedStorage) or storage.positions is None:
        return None
    if settings.history_dtype is not None or not past.is_readable:
        return None
    (geometry, weight, y, output_sizes, _), x = inputs.operands[0], inputs.x
    if y is None or x.shape[2:] != output_sizes or len(y) != len(x) or not 0 < past.slots <= _MOST_STEPS:
        return None
    if not Tables.has_room(geometry, x) or (y.shape[1], x.shape[1]) != (geometry.in_channels, geometry.out_channels):
        return None
    # A lone position is centred first, which the reference does.
    if weight.numel() != x.shape[1] * geometry.patch_size or (inputs.moments is None and x.numel() == x.shape[1]):
        return None
    try:
        return _Workspace(inputs, past, storage, settings)
    except Unfit:
        return None


class _Extent:
    """What compiled code wants to know in backward of a step's results."""

    def __init__(self, shape: torch.Size, geometry: C.Geometry, steps: int, samples: int, has_rest: bool) -> None:
        self.shape = shape
        channels, size = shape[1], geometry.patch_size
        of_kernel = geometry.in_channels // geometry.groups, *geometry.kernel
        self.weight = (channels, size) if geometry.transposed else (channels, *of_kernel)
        self.coefficients = steps * samples * channels
        structure = library.structures["extent", None]
        self._structure = structure(*_extent(shape), steps, samples, geometry.groups, size, has_rest)
        self.pointer = ctypes.byref(self._structure)


class _Workspace:
    """What a step needs and the next one can use again: structures, tables, room, and a row to be remembered.

    It is for one operator, storage and settings, and inputs of one size, all of which is looked at once. It belongs to
    one step at a time, from its forward until it is remembered.
    """

    def __init__(self, inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> None:
        (geometry, _, y, _, _), x = inputs.operands[0], inputs.x
        assert y is not None
        assert storage.positions is not None
        self._owners, self._sizes = (storage, settings), (geometry, x.shape, y.shape, x.dtype)
        self._lone = x.numel() == x.shape[1]
        self._threads, self._vector = torch.get_num_threads(), (x.shape[1],)
        self._tables = Tables(geometry, y, x, storage.positions)
        self._batch: Any = library.structures["batch", x.dtype]()
        self._memory: Any = library.structures["memory", x.dtype]()
        self._structures = (*map(ctypes.byref, (self._batch, self._memory, self._tables.structure)),)
        self._functions = library.functions[x.dtype]
        self._layouts: dict[int, types.Layout] = {}
        self._today = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        self._today_places = self._today[0].data_ptr(), self._today[1].data_ptr()
        self._batch.n, self._batch.c, self._batch.s = _extent(x.shape)
        self._point_to_rings(past, storage, settings, x)
        self._room = x.new_empty(self._tables.room(isinstance(storage, C.GradientStorage)))
        self._memory.scratch = self._room.data_ptr()

    def _point_to_rings(self, past: Past, storage: Storage, settings: Settings, x: Tensor) -> None:
        """Say where what is remembered is, and where what is to be remembered goes."""
        memory, (channels,), geometry = self._memory, self._vector, self._sizes[0]
        self._rings, self._next = dict(past.rings), {}  # as long as addresses are kept, the tensors are
        self._samples = past.rings["products"].shape[1] if "products" in past.rings else 1
        if not isinstance(storage, C.GradientStorage) and self._samples <= self._tables.amount:
            raise Unfit
        for name, shape in C.history_shapes(channels, storage, settings).items():
            shape = (self._samples, *shape[1:]) if name.endswith(C.SAMPLES) else shape
            field = _FIELDS.get(name, name)
            setattr(memory, field, address(past.rings[name], x.dtype, (past.slots, *shape)))
            if hasattr(memory, f"next_{field}"):
                self._next[name] = x.new_zeros((past.slots,) if name == "variogram" else shape)
                setattr(memory, f"next_{field}", self._next[name].data_ptr())
        place = address(past.num_steps, torch.int64, ())
        assert place is not None
        self._rings["num_steps"], self._num_steps, self._slots = (
            past.num_steps,
            ctypes.c_int64.from_address(place),
            past.slots,
        )
        memory.num_steps, memory.slots = place, past.slots
        memory.m, memory.groups, memory.i = self._samples, geometry.groups, geometry.patch_size
        if settings.weights == "auto":
            self._step_weights, self._differences = x.new_zeros(past.slots), x.new_empty(channels, past.slots)
            self._batch.step_weights, memory.differences = self._step_weights.data_ptr(), self._differences.data_ptr()
            memory.price, memory.rate = C.gradient_price(len(x)), weighting.AVERAGING_RATE

    def is_for(self, inputs: StepInputs, storage: Storage | None, settings: Settings) -> bool:
        """Tell whether it is for such a step."""
        (geometry, _, y, _, _), x = inputs.operands[0], inputs.x
        return (
            y is not None
            and (storage, settings) == self._owners
            and (geometry, x.shape, y.shape, x.dtype) == self._sizes
            and self._threads == torch.get_num_threads()
            and not (self._lone and inputs.moments is None)
        )

    def step(self, inputs: StepInputs, past: Past) -> Outcome | None:
        """Do a step."""
        batch, memory, (geometry, x_shape, y_shape, dtype) = self._batch, self._memory, self._sizes
        x, (_, weight, y, _, _), vector, (_, settings) = inputs.x, inputs.operands[0], self._vector, self._owners
        assert y is not None
        if geometry.transposed:
            weight = C.flatten_weight(weight.detach(), geometry)  # it lives as long as its address is needed
        batch.x, memory.y = address(x, dtype, x_shape, dense=False), address(y, dtype, y_shape, dense=False)
        batch.x_stride, memory.y_stride = x.stride()[0], y.stride()[0]
        memory.weight = address(weight, dtype, weight.shape)
        if weight.numel() != x_shape[1] * geometry.patch_size:
            raise Unfit
        today, output, norm = inputs.moments, None, inputs.norm
        if today is None:
            assert norm is not None
            running_mean, running_var, tracked, gamma, beta, batch.eps, batch.momentum = norm
            batch.gamma, batch.beta = address(gamma, dtype, vector), address(beta, dtype, vector)
            batch.running_mean, batch.running_var = (
                address(running_mean, dtype, vector),
                address(running_var, dtype, vector),
            )
            batch.num_batches_tracked = address(tracked, torch.int64, ())
            today, output = self._today, torch.empty_like(x, memory_format=torch.contiguous_format)
            batch.output, (batch.today_mean, batch.today_var) = output.data_ptr(), self._today_places
        else:
            batch.output = batch.running_mean = None
            batch.today_mean, batch.today_var = address(today[0], dtype, vector), address(today[1], dtype, vector)
        batch.has_moments = output is None
        num_steps, slots = self._num_steps.value, self._slots
        steps = min(num_steps, slots)
        if settings.rate != 1:
            relative = C.weights_by_age(steps, num_steps % slots, settings.rate, dtype, x.device).relative
            batch.step_weights = None if relative is None else relative.data_ptr()
        layout = self._layout(steps)
        packed = x.new_empty(layout.size)
        memory.seen, memory.remember, memory.results = num_steps, inputs.remember, packed.data_ptr()
        came_to = self._functions["step"](*self._structures, self._threads)
        if came_to == _NOT_FINITE:
            return None
        if came_to == _NOT_THE_OPERATOR:
            raise NotTheOperatorsOutput
        if output is not None and norm is not None:
            torch.autograd.graph.increment_version(norm[:3])
        found = PackedStatistics(packed, layout, batch.bessel, batch.counted, batch.n * batch.s)
        commit = partial(self._remember, past, today) if inputs.remember and came_to == _DONE else None
        return Outcome(found, commit, output)

    def _layout(self, steps: int) -> types.Layout:
        """Return what the results are of a step that remembers so many."""
        if steps not in self._layouts:
            (geometry, shape, _, _), (storage, _) = self._sizes, self._owners
            samples, has_rest = self._samples, isinstance(storage, C.GradientStorage)
            shapes = types.result_shapes(shape[1], steps, samples, 1, [geometry], False, has_rest)
            extent = _Extent(shape, geometry, steps, samples, has_rest)
            self._layouts[steps] = types.make_layout(shapes, steps > 0, extent)
        return self._layouts[steps]

    def _remember(self, past: Past, _: Sequence[Tensor]) -> None:
        """Write what the step has made into the rings. Its moments must live until then."""
        with past.lock:
            self._functions["remember"](*self._structures)
        past.scratch.append(self)
