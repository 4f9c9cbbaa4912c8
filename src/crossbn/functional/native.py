"""Compiled twins of what a training step does on the CPU, `native.c`; none of them is needed.

Where a C compiler was found when the package was installed, the functions of this directory hand plain float32 and
float64 tensors in the CPU's memory to these. Elsewhere, under `torch.compile`, and with the variable CROSSBN_NATIVE
set to 0, they do the same with torch's operators.

| here | its twin |
|---|---|
| `moments` | `moments.batch_moments` |
| `remember_samples`, `remember_gradients` | `sensitivity` |
| `pool_samples`, `pool_gradients` | `taylor.project` and `compensate`, `pooling.pool` |
| `blend` | `normalize`'s backward |
| `coefficients`, `add_gradient_` | `normalize.Jacobian.add_weight_gradient_` |
"""

import ctypes
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

_INTERFACE = 2
MOST_STEPS = 63
"""Remembered steps that can be pooled."""

NUMBER, POINTER, _THREADS, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_double
_LETTERS = {"n": NUMBER, "p": POINTER, "t": _THREADS, "r": _REAL}
_ARGUMENTS = {  # of each function in turn: n for a number, p for an array, r for a real, t for threads
    "moments": "p" + "n" * 4 + "ppt",
    "blend": "pp" + "nnn" + "pprpn" + "p" * 6 + "t",
    "remember_samples": "pn" + "pnpn" + "ppp" + "n" + "p" * 6 + "t",
    "remember_gradients": "pn" + "pnpn" + "ppp" + "p" * 10 + "t",
    "pool_samples": "pnn" + "p" * 5 + "t",
    "pool_gradients": "pnnn" + "p" * 9 + "t",
    "move_running": "nppr" + "rpp",
    "all_finite": "pn",
    "coefficients": "nnn" + "ppnn" + "ppp",
    "add_gradient": "nnnn" + "p" * 5 + "t",
}
_PLAIN = Tensor, nn.Parameter
_TYPES = {torch.float32: "float32", torch.float64: "float64"}


def _load() -> dict[torch.dtype, dict[str, Any]]:
    """Return the functions by type and name; nothing if there is no library, or one of another machine or version."""
    found = importlib.util.find_spec("crossbn.functional._native")
    if os.environ.get("CROSSBN_NATIVE") == "0" or found is None or found.origin is None:
        return {}
    try:
        library = ctypes.CDLL(found.origin)
    except OSError:
        return {}
    if library.crossbn_interface() != _INTERFACE:
        return {}
    functions: dict[torch.dtype, dict[str, Any]] = {}
    for dtype, suffix in _TYPES.items():
        functions[dtype] = {name: getattr(library, f"{name}_{suffix}") for name in _ARGUMENTS}
        for name, function in functions[dtype].items():
            function.argtypes = [_LETTERS[letter] for letter in _ARGUMENTS[name]]
    return functions


_functions = _load()
_switched_off = False


def is_available() -> bool:
    """Tell whether the compiled functions are there and in use."""
    return bool(_functions) and not _switched_off


@contextmanager
def switched_off() -> Iterator[None]:
    """Do without the compiled functions for a while."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def fit(*tensors: Tensor) -> bool:
    """Tell whether these can be handed over: float32 or float64 all of them, on the CPU, each image of them dense."""
    if not _functions or _switched_off or torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    dtype = tensors[0].dtype
    if dtype not in _functions:
        return False
    for each in tensors:  # no generator: this is asked several times a step
        if each.dtype is not dtype or not each.is_cpu or type(each) not in _PLAIN or is_functorch_wrapped_tensor(each):
            return False
        if not each.is_contiguous() and not _has_dense_images(each):
            return False
    return True


def _has_dense_images(x: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return x.ndim > 1


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` [N, C, ...] per channel."""
    mean = x.new_empty(x.shape[1])
    var = torch.empty_like(mean)
    _functions[x.dtype]["moments"](x.data_ptr(), *_extent(x), mean.data_ptr(), var.data_ptr(), torch.get_num_threads())
    return mean, var


def _extent(x: Tensor) -> tuple[int, int, int, int]:
    """Return images, channels, positions of an image, and the stride of images."""
    batch, channels, *space = x.shape
    return batch, channels, math.prod(space), x.stride(0)


def all_finite(x: Tensor) -> bool:
    """Tell whether all numbers of a dense tensor are finite."""
    return bool(_functions[x.dtype]["all_finite"](x.data_ptr(), x.numel()))


def move_running(
    mean: Tensor, var: Tensor, bessel: float, momentum: float, running_mean: Tensor, running_var: Tensor
) -> None:
    """Move running statistics towards `mean` and `bessel * var`."""
    _functions[mean.dtype]["move_running"](
        *(mean.shape[0], mean.data_ptr(), var.data_ptr(), bessel, momentum),
        *(running_mean.data_ptr(), running_var.data_ptr()),
    )
    torch.autograd.graph.increment_version((running_mean, running_var))


class Blended(NamedTuple):
    """Gradients of what goes into `normalize`."""

    x: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor


def blend(grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float, share: Tensor, gamma: Tensor) -> Blended:
    """Return the gradients, from that of the output."""
    grad, x = grad.contiguous(), x.contiguous()
    result = torch.empty_like(x), *(torch.empty_like(gamma) for _ in range(4))
    _functions[x.dtype]["blend"](
        *(grad.data_ptr(), x.data_ptr(), *_extent(x)[:3], mean.data_ptr(), var.data_ptr(), eps),
        *(share.data_ptr(), int(share.numel() > 1), gamma.data_ptr()),
        *(each.data_ptr() for each in result),
        torch.get_num_threads(),
    )
    return Blended(*result)


class Site(ctypes.Structure):
    """`struct site`: an operator at one size of its input and output (see `site.py`)."""

    _fields_ = (
        *((name, NUMBER) for name in ("images", "channels", "space", "in_channels")),
        ("sizes", NUMBER * 3),
        ("groups", NUMBER),
        ("taps", NUMBER * 3),
        ("often", POINTER * 3),
        *((name, NUMBER) for name in ("amount", "jump")),
        *((name, POINTER) for name in ("tap", "inside")),
    )


class Step(NamedTuple):
    """A training step to be remembered."""

    x: Tensor
    """What the operator made, [N, C, ...]."""
    y: Tensor
    """What it read, [N, C_in, ...]."""
    mean: Tensor
    var: Tensor
    start: int
    """Which position to look at first."""
    scratch: Tensor


def remember_samples(site: Site, step: Step, slot: Mapping[str, Tensor]) -> bool:
    """Write the step to its place in the history; nothing, and return False, if the input is not finite."""
    rows, products, centred = slot["0.rows"], slot["products"], slot["centred"]
    written = _functions[step.x.dtype]["remember_samples"](
        *(ctypes.byref(site), *_addresses(step), rows.shape[0] - 1, *_kept(slot)),
        *(rows.data_ptr(), products.data_ptr(), centred.data_ptr(), torch.get_num_threads()),
    )
    return bool(written)


def remember_gradients(site: Site, step: Step, slot: Mapping[str, Tensor]) -> bool:
    """Write the step to its place in the history; nothing, and return False, if the input is not finite."""
    mean_grad, var_grad = slot["0.mean_grad"], slot["0.var_grad"]
    centred = step.x.new_empty(site.amount, site.channels)
    scaled, patches = torch.empty_like(centred), step.x.new_empty(site.amount, mean_grad.numel())
    written = _functions[step.x.dtype]["remember_gradients"](
        *(ctypes.byref(site), *_addresses(step), *_kept(slot)),
        *(mean_grad.data_ptr(), slot["mean_at"].data_ptr(), var_grad.data_ptr(), slot["var_at"].data_ptr()),
        *(centred.data_ptr(), scaled.data_ptr(), patches.data_ptr(), torch.get_num_threads()),
    )
    if written and site.groups == 1:
        torch.mm(scaled.mT, patches, out=var_grad)
    return bool(written)


def _addresses(step: Step) -> tuple[int, ...]:
    x, y, mean, var, start, scratch = step
    arrays = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), mean.data_ptr(), var.data_ptr(), scratch.data_ptr()
    return start, *arrays


def _kept(slot: Mapping[str, Tensor]) -> tuple[int, ...]:
    return slot["mean"].data_ptr(), slot["var"].data_ptr(), slot["count"].data_ptr()


class _Batch(ctypes.Structure):
    _fields_ = (
        ("x", POINTER),
        *((name, NUMBER) for name in ("images", "channels", "space", "x_stride")),
        *((name, POINTER) for name in ("today_mean", "today_var", "mean", "var", "gamma", "beta")),
        ("eps", _REAL),
        ("y", POINTER),
    )


class Batch:
    """A batch to be pooled with remembered steps and, if `normalize` is asked for, normalized with the result.

    Args:
        x: input [N, C, ...].
        moments: its mean and biased variance, if they are known already.
        normalize: gamma, beta and eps; None if that is done elsewhere. Moments must not be known then.
    """

    def __init__(
        self,
        x: Tensor,
        moments: tuple[Tensor, Tensor] | None,
        normalize: tuple[Tensor | None, Tensor | None, float] | None = None,
    ) -> None:
        known = moments is not None
        self.today_mean, self.today_var = moments or (x.new_empty(x.shape[1]), x.new_empty(x.shape[1]))
        self.mean, self.var = torch.empty_like(self.today_mean), torch.empty_like(self.today_mean)
        self.y = None if normalize is None else torch.empty(x.shape, dtype=x.dtype)
        gamma, beta, eps = normalize or (None, None, 0.0)
        self.structure = _Batch(
            *(None if known else x.data_ptr(), *_extent(x)),
            *(self.today_mean.data_ptr(), self.today_var.data_ptr(), self.mean.data_ptr(), self.var.data_ptr()),
            *(None if each is None else each.data_ptr() for each in (gamma, beta)),
            *(eps, None if self.y is None else self.y.data_ptr()),
        )


def pool_samples(
    batch: Batch, past_mean: Tensor, past_var: Tensor, product: Tensor, at: Tensor, centred: Tensor
) -> bool:
    """Pool, and turn `product` into the coefficients of the rows in d var / dW; return whether the batch is finite.

    Args:
        batch: today's.
        past_mean: as they were, [R, C].
        past_var: as they were, [R, C].
        product: <row, W> at today's weights, [R, M, C]; the first row of a step is the mean patch.
        at: the same as it was.
        centred: 2 (x - mean) / P at the rows' positions.
    """
    finite = _functions[at.dtype]["pool_samples"](
        *(ctypes.byref(batch.structure), *at.shape[:2], past_mean.data_ptr(), past_var.data_ptr()),
        *(product.data_ptr(), at.data_ptr(), centred.data_ptr(), torch.get_num_threads()),
    )
    return bool(finite)


class Gradients(NamedTuple):
    """What is remembered of R steps: gradients of mean and variance, and their products with the weights then."""

    mean_grad: Tensor
    """[R, groups, I]."""
    var_grad: Tensor
    """[R, C, I]."""
    mean_at: Tensor
    var_at: Tensor


def pool_gradients(
    batch: Batch, past_mean: Tensor, past_var: Tensor, weight: Tensor, gradients: Gradients
) -> tuple[bool, Tensor, Tensor]:
    """Pool; return whether the batch is finite, and of d var / dW the mean patches' coefficients [R, C], and the rest.

    Args:
        batch: today's.
        past_mean: as they were, [R, C].
        past_var: as they were, [R, C].
        weight: today's, [C, I].
        gradients: the remembered ones.
    """
    towards, rest = torch.empty_like(past_mean), torch.empty_like(weight)
    finite = _functions[weight.dtype]["pool_gradients"](
        *(ctypes.byref(batch.structure), *gradients.mean_grad.shape, weight.data_ptr()),
        *(past_mean.data_ptr(), past_var.data_ptr(), *(each.data_ptr() for each in gradients)),
        *(towards.data_ptr(), rest.data_ptr(), torch.get_num_threads()),
    )
    return bool(finite), towards, rest


def coefficients(of_mean: Tensor, of_var: Tensor, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
    """Return those of the rows in dL/dW [R, M, C]; `of_mean` [R, C] or [R, 1] is of each step's first row only."""
    result = torch.empty_like(of_var)
    channel_stride = of_mean.stride(1) if of_mean.shape[1] > 1 else 0
    _functions[of_var.dtype]["coefficients"](
        *(*of_var.shape, of_var.data_ptr(), of_mean.data_ptr(), of_mean.stride(0), channel_stride),
        *(grad_mean.data_ptr(), grad_var.data_ptr(), result.data_ptr()),
    )
    return result


def add_gradient_(grad: Tensor, rows: Tensor, coefficient: Tensor, rest: Tensor, grad_var: Tensor) -> None:
    """Add the rows [R, 1, groups, I] times their coefficients [R, 1, C], and `rest` times dL/dvar, to `grad` [C, I]."""
    steps, _, groups, size = rows.shape
    _functions[grad.dtype]["add_gradient"](
        *(steps, grad.shape[0], groups, size, rows.data_ptr(), coefficient.data_ptr(), rest.data_ptr()),
        *(grad_var.data_ptr(), grad.data_ptr(), torch.get_num_threads()),
    )
