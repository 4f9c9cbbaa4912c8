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
from torch import Tensor, nn

from crossbn import functional as C  # the library's F
from crossbn.messages import say
from crossbn.ops import cpu, library, reference, triton
from crossbn.ops.coverage import Way, ways_of
from crossbn.ops.types import (
    NormTensors,
    NotTheOperatorsOutput,
    Outcome,
    PackedStatistics,
    Past,
    Statistics,
    StepInputs,
    Variances,
    joined,
)
from crossbn.torch_internals import is_wrapped

DEVICES: dict[str, ModuleType] = {"cpu": cpu, "cuda": triton}
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
            inputs = inputs._replace(moments=(mean, var), finite=Variances(var), norm=None)
    if found is None and device is not None:
        found = device.step(inputs, past, storage, settings)
    if found is not None:
        return found
    if inputs.x.device.type not in _SAID and (lacking := why_none(inputs.x)) is not None:
        _SAID.add(inputs.x.device.type)
        say(f"training steps on {inputs.x.device.type} are done by torch's operators, many small ones: {lacking}")
    return reference.step(inputs, past, storage, settings)


_SAID = {"meta"}
"""Devices of which it has been said; nobody waits for one without values."""


def why_none(x: Tensor) -> str | None:
    """Say why the device of `x` has no implementation at all, if it has none."""
    kind = x.device.type
    if kind not in DEVICES:
        return f"there are no kernels for {kind}"
    if DEVICES[kind] is triton and not triton.is_installed():
        return "Triton is not installed: pip install triton"
    return None


def explain(model: nn.Module) -> list[Way]:
    """Return how each cross-iteration norm of `model` does its training steps, and why by torch's operators if so.

    Example:
        >>> import crossbn
        >>> from crossbn import ops
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
        >>> report = crossbn.convert_(model, window=4, weights="equal", order=2)
        >>> print(*ops.explain(model))
        1: 8 channels on cpu by torch, because order=2
    """
    return list(ways_of(model, _way))


def _way(storage: C.Storage | None, settings: C.Settings, x: Tensor) -> tuple[str, str | None]:
    if (lacking := why_none(x)) is not None:
        return "torch", lacking
    if x.is_cpu:
        reason = None if library.in_use(x) else "the compiled library is not there, or for another type"
        return "torch" if reason else "C", reason
    reason = triton.why_not(storage, settings, x)
    return "torch" if reason else "Triton", reason


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


def move_running(found: Statistics, running: tuple[Tensor, Tensor, Tensor], momentum: float | None) -> None:
    """Move running mean and variance towards pooled ones, and count a step, if all stays finite.

    A `momentum` of None is for a cumulative average; a lone position has no variance, and nothing is learnt of it.
    """
    device = DEVICES.get(found.mean.device.type)
    if found.finite is False or (device is not None and device.move_running(found, running, momentum)):
        return
    rate = 1 / (running[2] + 1).to(found.mean.dtype) if momentum is None else momentum
    pairs = zip(running[:2], (found.mean, found.var * found.bessel), strict=True)
    # Their own type may be the narrower one.
    mean, var = [torch.lerp(old.to(target.dtype), target, rate).to(old.dtype) for old, target in pairs]
    if isinstance(found.has_variance, Tensor):
        var = torch.where(found.has_variance, var, running[1])
    elif not found.has_variance:
        var = running[1]
    take_over(mean, var, running, found.finite)


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
