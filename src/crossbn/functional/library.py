"""The library that `compiled/` has become, if it has, and whether tensors can be handed to it.

Where a C compiler was found when the package was installed, the functions of this directory hand plain float32 and
float64 tensors in the CPU's memory to `native.py`. Elsewhere, under `torch.compile`, and with the variable
CROSSBN_NATIVE set to 0, they do the same with torch's operators.
"""

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

_INTERFACE = 5
NUMBER, POINTER, _THREADS, REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_double
_LETTERS = {"n": NUMBER, "p": POINTER, "t": _THREADS, "r": REAL}
_ARGUMENTS = {  # of each function in turn: n for a number, p for an array, r for a real, t for threads
    "moments": "p" + "n" * 4 + "ppt",
    "blend": "pp" + "nnn" + "pprpn" + "p" * 6 + "t",
    "step": "ppp" + "t",
    "move_running": "nppr" + "rpp",
    "take_over": "n" + "p" * 5,
    "all_finite": "pn",
    "add_gradient": "n" * 5 + "ppp" + "nn" + "p" * 5 + "t",
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
    by_type: dict[torch.dtype, dict[str, Any]] = {}
    for dtype, suffix in _TYPES.items():
        by_type[dtype] = {name: getattr(library, f"{name}_{suffix}") for name in _ARGUMENTS}
        for name, function in by_type[dtype].items():
            function.argtypes = [_LETTERS[letter] for letter in _ARGUMENTS[name]]
    return by_type


functions = _load()
"""What `compiled/` defines, by type of numbers and name; empty if it was not compiled."""
_switched_off = False


def is_available() -> bool:
    """Tell whether the compiled functions are there and in use."""
    return bool(functions) and not _switched_off


@contextmanager
def switched_off() -> Iterator[None]:
    """Do without the compiled functions for a while."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def in_use() -> bool:
    """Tell whether the compiled functions may be called here: they are there, and nothing is being traced."""
    return is_available() and not torch.compiler.is_compiling() and not torch._C._is_tracing()


def fit(*tensors: Tensor) -> bool:
    """Tell whether these can be handed over: float32 or float64 all of them, on the CPU, each image of them dense."""
    if not in_use():
        return False
    dtype = tensors[0].dtype
    if dtype not in functions:
        return False
    for each in tensors:  # no generator: this is asked several times a step
        if each.dtype is not dtype or not each.is_cpu or type(each) not in _PLAIN or is_functorch_wrapped_tensor(each):
            return False
        if each.is_neg() or (not each.is_contiguous() and not _has_dense_images(each)):
            return False
    return True


def _has_dense_images(x: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return x.ndim > 1
