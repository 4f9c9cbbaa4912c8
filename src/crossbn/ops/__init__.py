"""The operations that carry the time of a training step, each with one schema and an implementation for each device.

`reference.py` and `functional` do all of it with torch's operators, on any device. An implementation for a device is a
file with functions of the same names and arguments that return None, or False, where the case is not theirs; it has a
line in `DEVICES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.ops import cpu, library, reference
from crossbn.ops.types import (
    NormTensors,
    NotTheOperatorsOutput,
    Outcome,
    PackedStatistics,
    Past,
    Statistics,
    StepInputs,
    joined,
)
from crossbn.torch_internals import is_wrapped

DEVICES: dict[str, ModuleType] = {"cpu": cpu}
"""Implementations by the type of device."""


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` [N, C, ...] per channel, in at least float32; differentiable."""
    device = DEVICES.get(x.device.type)
    found: tuple[Tensor, Tensor] | None = None if device is None else device.moments(x)
    return C.batch_moments(x) if found is None else found


def step(inputs: StepInputs, past: Past, storage: C.Storage | None, settings: C.Settings) -> Outcome:
    """Do a training step of a segment; see `reference.step`."""
    device = DEVICES.get(inputs.x.device.type)
    found: Outcome | None = None
    if inputs.moments is None:
        if device is not None and inputs.norm is not None:
            found = device.step(inputs, past, storage, settings)
        if found is None:
            mean, var = moments(inputs.x)
            inputs = inputs._replace(moments=(mean, var), finite=C.all_finite(var), norm=None)
    if found is None and device is not None:
        found = device.step(inputs, past, storage, settings)
    return reference.step(inputs, past, storage, settings) if found is None else found


def step_backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    eps: float,
    statistics: Statistics,
    jacobians: Sequence[tuple[int, C.Jacobian]] | None = (),
    group: dist.ProcessGroup | None = None,
) -> C.Gradients:
    """Return the gradients of the normalization of `x` and of the operators' weights; see `functional.gradients`.

    `grad` is that of the output; gamma is 1 if it is None. The `jacobians` are those of operators, each with the first
    of the channels that it feeds; None for those of the statistics. With a `group` of processes today's batch is that
    of all of them.
    """
    device = None if group is not None else DEVICES.get(x.device.type)
    if device is not None:
        found: C.Gradients | None = device.step_backward(grad, x, gamma, eps, statistics, jacobians)
        if found is not None:
            return found
    refuse_batches(grad)
    mean, var, share = statistics.mean, statistics.var, statistics.share
    count = None if group is None else torch.as_tensor(statistics.positions, device=x.device)
    if jacobians is None:
        assert statistics.dependence is not None
        jacobians = [(0, each) for each in statistics.dependence.jacobians]
    gamma = torch.ones_like(mean) if gamma is None else gamma
    return C.gradients(grad, x, mean, var, share, gamma, eps, jacobians, count, group)


def refuse_batches(grad: Tensor) -> None:
    """Raise RuntimeError if `grad` is a batch of gradients, which torch would take for one."""
    if not torch.compiler.is_compiling() and is_wrapped(grad):
        raise RuntimeError("batched gradients (is_grads_batched=True, vmap) are not supported: take one at a time")


def add_weight_gradient_(grad: Tensor, jacobian: C.Jacobian, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
    """Add dL/dW to the gradient `grad` of a weight [C, ...], in place where that can be done; return the sum."""
    device = DEVICES.get(grad.device.type)
    if device is not None and device.add_weight_gradient_(grad, jacobian, grad_mean, grad_var):
        return grad
    rows = jacobian.weight_gradient(grad_mean, grad_var)
    if not grad.is_contiguous() or grad.dtype != rows.dtype:
        return grad + rows.reshape(grad.shape).to(grad.dtype)
    grad.view(len(grad), -1).add_(rows)
    return grad


def take_over(mean: Tensor, var: Tensor, running: tuple[Tensor, Tensor, Tensor], finite: C.Flag = True) -> None:
    """Let running mean and variance be `mean` and `var`, and count a step, if they are finite and so is all else."""
    device = DEVICES.get(mean.device.type)
    if finite is True and device is not None and device.take_over(mean, var, running):
        return
    finite = finite & C.all_finite(mean + var)
    if finite is False:
        return
    for before, after in zip(running[:2], (mean, var), strict=True):
        before.copy_(torch.where(finite, after, before) if isinstance(finite, Tensor) else after)
    running[2].add_(finite)
