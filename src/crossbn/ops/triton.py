"""The operations of a training step as a few fused kernels, on a GPU, by Triton; none of them is needed.

As in `cpu.py` each returns None, or False, where the case is another. Products of matrices and what BatchNorm's own
kernels do stay torch's. Nothing here looks at a value, and what a step needs of room it allocates anew: it can be
captured in a CUDA graph, as rings and running statistics are written where they are.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Gradients, Jacobian, Settings, Storage
from crossbn.ops import gpu_step
from crossbn.ops.coverage import is_traced, why_reference
from crossbn.ops.reference import without_autocast
from crossbn.ops.types import NormTensors, Outcome, Past, Statistics, StepInputs, flat_strides

NARROW = (torch.bfloat16, torch.float16)
_MOST_STEPS, _MOST_DIMENSIONS, _MOST_POSITIONS = 63, 3, 2**31
_NUMBERS = 128


@functools.lru_cache(1)
def is_installed() -> bool:
    """Tell whether Triton is there, without importing it."""
    return importlib.util.find_spec("triton") is not None


def why_not(storage: Storage | None, settings: Settings, x: Tensor) -> str | None:
    """Say why a step that is otherwise usual is not done here; `x` is of its device and type, or its statistics are."""
    if not is_installed():
        return "Triton is not installed: pip install triton"
    if x.dtype not in (torch.float32, *NARROW):
        return f"{x.dtype} is left to torch"
    if isinstance(storage, C.ActivatedStorage):
        return "an activation follows its operator"
    if settings.prior is not None:
        return 'prior="running"'
    if settings.window > _MOST_STEPS + 1:
        return f"window={settings.window} is above {_MOST_STEPS + 1}"
    if storage is not None and len(storage.geometries[0].kernel) > _MOST_DIMENSIONS:
        return f"its operator has {len(storage.geometries[0].kernel)} dimensions"
    return None


def moments(_: Tensor) -> None:
    """Leave the moments to torch, which has a kernel for them."""


def take_over(*_: Any) -> bool:
    """Leave it to torch: `move_running` does more."""
    return False


def move_running(found: Statistics, running: tuple[Tensor, Tensor, Tensor], momentum: float | None) -> bool:
    """Move the running statistics towards those of segments side by side, which are vectors; see `types.joined`."""
    vectors = found.mean, found.var, found.bessel
    if not is_installed() or is_traced() or found.has_variance is not True or found.finite is not True:
        return False
    if momentum is None or not all(isinstance(each, Tensor) and each.ndim == 1 for each in vectors):
        return False
    if not all(_is_dense(each) for each in (*vectors, *running[:2])):  # type: ignore[arg-type]  # they are tensors
        return False
    gpu_step.move_running(*vectors, running, momentum)  # type: ignore[arg-type]  # likewise
    return True


@torch.no_grad()
def step(inputs: StepInputs, past: Past, storage: Storage | None, settings: Settings) -> Outcome | None:
    """Do a whole step in the usual case: one operator, nothing added to it, first order, one process.

    An input that is not what the operator makes of its own is not told from others: nothing is waited for. The step is
    then BatchNorm's, and not remembered.
    """
    if inputs.finite is False or is_traced():
        return None
    if not past.slots and inputs.moments is not None and settings.active_group is None:
        return _alone(inputs, inputs.moments, past)
    if len(inputs.operands) != 1 or inputs.pooling is not True:
        return None
    if inputs.moments is None and (inputs.norm is None or not _is_plain(inputs.norm)):
        return None
    if storage is None or inputs.operands[0].y is None or not past.slots:
        return None
    work = past.scratch[-1] if past.scratch else None
    if not (isinstance(work, gpu_step.Work) and work.is_for(inputs, past, storage, settings)):
        if _is_other(inputs, storage, settings):
            return None
        work = gpu_step.Work(inputs, past, storage, settings)
        past.scratch[:] = [work]
    with without_autocast(inputs.x.device.type):
        return work.step(inputs, past)


def _alone(inputs: StepInputs, moments: tuple[Tensor, Tensor], past: Past) -> Outcome | None:
    """Return the statistics of a segment that remembers nothing."""
    positions = inputs.x.numel() // inputs.x.shape[1]
    if positions < 2 or moments[0].dtype != torch.float32 or not is_installed():
        return None
    return Outcome(gpu_step.alone(moments, positions, past), None, None)


def _is_plain(norm: NormTensors) -> bool:
    vectors = norm.running_mean, norm.running_var, norm.gamma, norm.beta
    return all(each is None or (each.dtype == torch.float32 and each.is_contiguous()) for each in vectors)


def _is_other(inputs: StepInputs, storage: Storage, settings: Settings) -> bool:
    """Tell whether the case is not one of those that kernels are for."""
    x, (geometry, weight, y, output_sizes, bias) = inputs.x, inputs.operands[0]
    assert y is not None
    told = 1, inputs.bias is not None or bias is not None, inputs.is_complete
    if why_reference(storage, settings, *told) is not None or why_not(storage, settings, x) is not None:
        return True
    if x.shape[2:] != output_sizes or len(y) != len(x) or y.dtype not in (torch.float32, *NARROW):
        return True
    if (y.shape[1], x.shape[1]) != (geometry.in_channels, geometry.out_channels):
        return True
    if weight.numel() != x.shape[1] * geometry.patch_size or max(x.numel(), y.numel()) >= _MOST_POSITIONS:
        return True
    is_lone = x.numel() == x.shape[1]  # it is centred first, which the reference does
    return is_lone or flat_strides(x) is None or flat_strides(y) is None


def step_backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    eps: float,
    statistics: Statistics,
    jacobians: Sequence[tuple[int, Jacobian]] | None,
) -> Gradients | None:
    """Return the gradients of the normalization and of the operators' weights."""
    mean, var, share, channels = statistics.mean, statistics.var, statistics.share, x.shape[1]
    if jacobians is None:
        jacobians = [(0, each) for each in statistics.derivative.jacobians]
    wide = mean, var, share, mean if gamma is None else gamma
    if (
        not is_installed()
        or is_traced()
        or not all(map(_is_dense, wide))
        or not all(_is_dense_too(each) for _, each in jacobians)
    ):
        return None
    # Sums are not of the deviation, but the kernel is told one.
    sum_grad, sum_product = C.gradient_sums(grad, x, mean, var, gamma)
    invstd, a, v, of_gamma, own_grad, own_product = vectors = mean.new_empty(6, channels).unbind()
    told = sum_grad, sum_product, mean if gamma is None else gamma, var, share, int(len(share) > 1)
    sizes, grid = (channels, float(x.numel() // channels), eps), (-(-channels // 128),)
    gpu_step.launch("backward_vectors", grid, *told, *vectors, *sizes, HAS_GAMMA=gamma is not None, CHANNELS=128)
    dx = C.input_gradient(grad, x, mean, invstd, gamma, own_grad, own_product)
    weights = []
    for start, jacobian in jacobians:
        stop = start + jacobian.var_coefficient.shape[2]
        weights.append(_weight_gradient(jacobian, a[start:stop], v[start:stop]))
    return Gradients(dx, of_gamma, sum_grad, a, v, weights)


def _is_dense(tensor: Tensor | None) -> bool:
    return tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())


def _is_dense_too(jacobian: Jacobian) -> bool:
    """Tell whether kernels can read what a step has left, the reference's perhaps."""
    rows, of_mean, of_var, rest = jacobian
    return of_mean.dtype == torch.float32 and _is_dense(rows) and _is_dense(of_var) and _is_dense(rest)


def add_weight_gradient_(grad: Tensor, jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> bool:
    """Add dL/dW to `grad`, from a = dL/dmean and v = dL/dvar [C]."""
    rows = jacobian.rows
    if not is_installed() or is_traced() or grad.dtype not in (torch.float32, *NARROW):
        return False
    if not (_is_dense_too(jacobian) and _is_dense(grad_mean) and _is_dense(grad_var)):
        return False
    if jacobian.var_jacobian is None and rows.shape[2] == 1 and grad.is_contiguous() and grad.dtype == torch.float32:
        coefficient = _row_coefficients(jacobian, grad_mean, grad_var)
        with without_autocast(grad.device.type):
            grad.view(len(grad), -1).addmm_(coefficient.mT, rows.flatten(0, 1).squeeze(1))
    else:
        grad.add_(_weight_gradient(jacobian, grad_mean, grad_var).view(grad.shape))
    return True


def _weight_gradient(jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
    """Return dL/dW [C, I]."""
    rows, of_mean, of_var, rest = jacobian
    (steps, _, groups, size), channels = rows.shape, of_var.shape[2]
    if rest is None:
        with without_autocast(rows.device.type):
            return C.spread(_row_coefficients(jacobian, grad_mean, grad_var), rows.flatten(0, 1))
    own, grid = rest.new_empty(channels, size), (channels, -(-size // _NUMBERS))
    told = rows, of_mean, *_mean_strides(of_mean), of_var, rest, grad_mean, grad_var, own
    gpu_step.launch("weight_gradient", grid, *told, channels, channels // groups, size, steps, NUMBERS=_NUMBERS)
    return own


def _row_coefficients(jacobian: Jacobian, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
    """Return what each row has in the weight's gradient, [R * M, C]."""
    _, of_mean, of_var, _ = jacobian
    steps, samples, channels = of_var.shape
    made = of_var.new_empty(steps * samples, channels)
    told = of_mean, *_mean_strides(of_mean), of_var, grad_mean, grad_var, made
    gpu_step.launch("row_coefficients", (-(-channels // 128), steps * samples), *told, channels, samples, CHANNELS=128)
    return made


def _mean_strides(of_mean: Tensor) -> tuple[int, int]:
    return of_mean.stride(0), of_mean.stride(1) if of_mean.shape[1] > 1 else 0
