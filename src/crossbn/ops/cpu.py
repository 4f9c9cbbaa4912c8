"""The operations of a training step in compiled code, on the CPU, see `csrc/`; none of them is needed.

Each returns None, and nothing has happened, where the case is another: `reference.py` then does it. Nothing reaches
compiled code but what `library.address` has looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossbn.functional import ActivatedStorage, Gradients, Jacobian, Settings, Storage
from crossbn.functional.moments import is_differentiated
from crossbn.ops import library
from crossbn.ops.coverage import why_reference
from crossbn.ops.library import Unfit, address, batch_at
from crossbn.ops.types import Outcome, PackedStatistics, Past, Statistics, StepInputs
from crossbn.ops.workspace import Results, Workspace, dense, extent_of, new_like

_MOST_STEPS = 63
_TABLE_ENTRIES = 2**20


def moments(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return mean and biased variance of `x` [N, C, ...] per channel, unless a derivative is to be taken of them."""
    if not library.in_use(x) or is_differentiated(x):
        return None
    try:
        start, *strides = batch_at(x, x.dtype, x.shape)
    except Unfit:
        return None
    mean, var = x.new_empty(2, x.shape[1]).unbind()
    function = library.functions[x.dtype]["moments"]
    function(start, *extent_of(x.shape), *strides, mean.data_ptr(), var.data_ptr(), torch.get_num_threads())
    return mean, var


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


def move_running(*_: Any) -> bool:
    """Leave it to torch: `step` has moved the running statistics in the usual case."""
    return False


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
    dtype, c, new, is_last = x.dtype, x.shape[1], x.new_empty, _is_last(statistics, x)
    grad, x = dense(grad, is_last), dense(x, is_last)
    weights: list[Tensor] = []
    extent = library.structures["extent", None]
    pooled: tuple[Any, ...]
    of_weight: tuple[int | None, ...] = ()
    try:
        given = batch_at(grad, dtype, x.shape)[0], batch_at(x, dtype, x.shape)[0], address(gamma, dtype, (c,))
        if isinstance(statistics, PackedStatistics):
            results: Results = statistics.layout  # type: ignore[assignment]  # it is from `step`
            if x.shape != results.shape:
                return None
            name, sizes, pooled = "backward_of", results.pointer, (address(statistics.packed, dtype, (results.size,)),)
            of_weight = None, None
            if jacobians is None:
                weights, scratch = [new(results.weight)], new(results.coefficients)
                of_weight = weights[0].data_ptr(), scratch.data_ptr()
        else:
            share, by_channel = statistics.share, len(statistics.share) > 1
            name, sizes = "step_backward", ctypes.byref(extent(*extent_of(x.shape), is_last=is_last))
            pooled = address(statistics.mean, dtype, (c,)), address(statistics.var, dtype, (c,))
            pooled += address(share, dtype, (c if by_channel else 1,)), by_channel
    except Unfit:
        return None
    own = new_like(x, is_last), new(c), new(c), new(c), new(c)
    made = [each.data_ptr() for each in own]
    library.functions[dtype][name](sizes, eps, *given, *pooled, *made, *of_weight, torch.get_num_threads())
    found = Gradients(*own, weights)
    for start, jacobian in jacobians or ():
        channels = jacobian.var_coefficient.shape[2]
        a, v = found.mean[start : start + channels], found.var[start : start + channels]
        found.weights.append(new(channels, jacobian.rows.shape[3]))
        if not _weight_gradient(found.weights[-1], jacobian, a, v, is_fresh=True):
            return None
    return found


def _is_last(statistics: Statistics, x: Tensor) -> bool:
    """Tell whether the channels of `x` are next to each other, as they were in the step."""
    if isinstance(statistics, PackedStatistics):
        results: Results = statistics.layout  # type: ignore[assignment]  # it is from `step`
        return results.is_last
    return x.ndim > 2 and not x.is_contiguous() and x.stride(1) == 1


def add_weight_gradient_(grad: Tensor, jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> bool:
    """Add dL/dW to `grad`, from a = dL/dmean and v = dL/dvar [C]."""
    if grad.is_contiguous():
        return _weight_gradient(grad, jacobian, grad_mean, grad_var, is_fresh=False)
    own = torch.empty_like(grad, memory_format=torch.contiguous_format)
    if not _weight_gradient(own, jacobian, grad_mean, grad_var, is_fresh=True):
        return False
    grad.add_(own)
    return True


def _weight_gradient(grad: Tensor, jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor, is_fresh: bool) -> bool:
    """Add it to `grad` or, if that is fresh, write it there."""
    (rows, of_mean, of_var, rest), dtype = jacobian, grad.dtype
    (steps, amount, groups, size), channels = rows.shape, of_var.shape[2]
    if not library.in_use(grad) or grad.numel() != channels * size or not steps:
        return False
    if of_mean.dtype is not dtype or not of_mean.is_cpu or of_mean.shape not in ((steps, channels), (steps, 1)):
        return False
    strides = of_mean.stride(0), of_mean.stride(1) if of_mean.shape[1] == channels > 1 else 0
    try:
        places = address(rows, dtype, rows.shape), of_mean.data_ptr(), *strides
        of_vars = address(of_var, dtype, (steps, amount, channels)), address(rest, dtype, (channels, size))
        vectors = address(grad_mean, dtype, (channels,)), address(grad_var, dtype, (channels,))
        place = address(grad, dtype, grad.shape)
    except Unfit:
        return False
    extent = library.structures["extent", None](c=channels, r=steps, m=amount, groups=groups, i=size)
    scratch = torch.empty_like(of_var)
    function, threads = library.functions[dtype]["weight_gradient"], torch.get_num_threads()
    function(ctypes.byref(extent), *places, *of_vars, *vectors, scratch.data_ptr(), is_fresh, place, threads)
    return True


def step(inputs: StepInputs, past: Past, storage: Storage | None, settings: Settings) -> Outcome | None:
    """Do a whole step in the usual case: one operator, nothing added to it, first order, one process.

    Raises:
        NotTheOperatorsOutput: if the input is not what the operator makes of its own.
    """
    if settings.consistent:
        return None
    if len(inputs.operands) != 1 or not inputs.is_complete or inputs.bias is not None or inputs.pooling is not True:
        return None
    if not library.in_use(inputs.x) or inputs.is_finite is not True:
        return None
    # Where an activation is between, moments are needed to make a row.
    if inputs.moments is None and (inputs.norm is None or isinstance(storage, ActivatedStorage)):
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


def _workspace(inputs: StepInputs, past: Past, storage: Storage | None, settings: Settings) -> Workspace | None:
    """Return one that no other step has, for this step to have."""
    if past.scratch:
        try:
            work: Workspace = past.scratch.pop()  # one operation: no other thread gets the same
            if work.is_for(inputs, storage, settings):
                return work
        except IndexError:
            pass
    if storage is None or why_reference(storage, settings, 1, False, True) is not None or not past.is_readable:
        return None
    (geometry, weight, y, output_sizes, _), x = inputs.operands[0], inputs.x
    if y is None or x.shape[2:] != output_sizes or len(y) != len(x) or not 0 < past.slots <= _MOST_STEPS:
        return None
    if x.shape[2:].numel() * geometry.taps > _TABLE_ENTRIES:
        return None
    if (y.shape[1], x.shape[1]) != (geometry.in_channels, geometry.out_channels):
        return None
    # A lone position is centred first, which the reference does.
    if weight.numel() != x.shape[1] * geometry.patch_size or (inputs.moments is None and x.numel() == x.shape[1]):
        return None
    try:
        return Workspace(inputs, past, storage, settings)
    except Unfit:
        return None
