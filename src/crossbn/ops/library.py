"""The library that `csrc/` has become, if it has, and handing tensors to it.

Where a C compiler was found when the package was installed, `cpu.py` hands plain float32 and float64 tensors in the
CPU's memory to it. Elsewhere, and with the variable CROSSBN_NATIVE set to 0, `reference.py` does the same with torch's
operators. CROSSBN_LIBRARY names another file to load.
"""

import ctypes
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.ops.types import ALIGNED, flat_strides
from crossbn.torch_internals import is_tracing

NUMBER, POINTER, _THREADS, REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_double
_LETTERS = {"n": NUMBER, "p": POINTER, "t": _THREADS, "r": REAL}
_ARGUMENTS = {  # of each function in turn: n for a number, p for an array or structure, r for a real, t for threads
    "moments": "pnnnnnppt",
    "step": "pppt",
    "remember": "pppt",
    "step_backward": "prppppppnpppppt",
    "backward_of": "prpppppppppppt",
    "weight_gradient": "pppnnpppppnpt",
    "take_over": "nppppp",
}
_PLAIN = Tensor, nn.Parameter
_TYPES = {torch.float32: "float32", torch.float64: "float64"}


class _Field(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("kind", NUMBER), ("offset", NUMBER))


def _structure(library: ctypes.CDLL, name: str, suffix: str = "") -> type[ctypes.Structure]:
    """Make a structure of the fields that the library says it has."""
    listed = []
    fields = ctypes.cast(getattr(library, f"{name}_fields{suffix}"), ctypes.POINTER(_Field))
    i = 0
    while fields[i].name:
        letter = chr(fields[i].kind)
        one = _LETTERS[letter.lower()]
        listed.append((fields[i].name.decode(), one * 3 if letter.isupper() else one))
        i += 1
    made = type(name, (ctypes.Structure,), {"_fields_": listed})
    offsets = [getattr(made, field).offset for field, _ in listed]
    if offsets != [fields[j].offset for j in range(i)] or ctypes.sizeof(made) != fields[i].offset:
        raise ValueError(f"structure {name} is laid out otherwise than ctypes would")
    return made


class Library:
    """What `csrc/` has become: functions by type of numbers and name, and structures by name."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        if (found := NUMBER.in_dll(library, "result_alignment").value) != ALIGNED:
            raise ValueError(f"results are aligned to {found} numbers there, to {ALIGNED} here")
        self.functions: dict[torch.dtype, dict[str, Any]] = {}
        self.structures: dict[tuple[str, torch.dtype | None], type[ctypes.Structure]] = {}
        for name in ("tables", "extent"):
            self.structures[name, None] = _structure(library, name)
        for dtype, suffix in _TYPES.items():
            self.functions[dtype] = {name: getattr(library, f"{name}_{suffix}") for name in _ARGUMENTS}
            for name, function in self.functions[dtype].items():
                function.argtypes = [_LETTERS[letter] for letter in _ARGUMENTS[name]]
            for name in ("batch", "memory"):
                self.structures[name, dtype] = _structure(library, name, f"_{suffix}")


def _load() -> Library | None:
    """Return the library; None if there is none, or one of another machine or version."""
    found = importlib.util.find_spec("crossbn.ops._native")
    path = os.environ.get("CROSSBN_LIBRARY") or (found.origin if found is not None else None)
    if os.environ.get("CROSSBN_NATIVE") == "0" or path is None:
        return None
    try:
        return Library(path)
    except (OSError, AttributeError, ValueError) as error:
        # AttributeError: a library without its symbols.
        warnings.warn(
            f"crossbn's compiled code is not used, torch's operators do the same slower: {error}", stacklevel=2
        )
        return None


_loaded = _load()
functions: dict[torch.dtype, dict[str, Any]] = {} if _loaded is None else _loaded.functions
"""What `csrc/` defines, by type of numbers and name; empty if it was not compiled."""
structures = {} if _loaded is None else _loaded.structures
"""Its structures, by name and type of numbers."""
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


def in_use(x: Tensor) -> bool:
    """Tell whether the compiled functions may be called for numbers like those of `x`: nothing is being traced."""
    return x.dtype in functions and not _switched_off and not torch.compiler.is_compiling() and not is_tracing()


class Unfit(Exception):  # noqa: N818  # not an error: torch's operators do it
    """A tensor that compiled code cannot read."""


def address(tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """Return where the numbers of a dense tensor are, which must have that type and shape; None for None.

    Raises:
        Unfit: if it is not a plain tensor of that type and shape in the CPU's memory.
    """
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise Unfit
    return _start_of(tensor, dtype, shape)


def batch_at(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return where the numbers of a batch [N, C, ...] are, and how far apart its images, and its positions.

    The last is 0 where an image is dense; else its channels are next to each other.

    Raises:
        Unfit: as for `address`, or if it is laid out otherwise.
    """
    place = 0
    if not _has_dense_images(x):
        strides = flat_strides(x)
        if strides is None or strides[2] == 0 or (strides[1] != 1 and x.shape[1] > 1):
            raise Unfit
        place = strides[2]
    return _start_of(x, dtype, shape), x.stride(0), place


def _start_of(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    if type(tensor) not in _PLAIN or tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
        raise Unfit
    if tensor.is_neg():
        raise Unfit
    try:
        place = tensor.data_ptr()
    except RuntimeError as error:  # what a transform of torch.func makes has no memory of its own
        raise Unfit from error
    if not place and tensor.numel():
        raise Unfit
    return place


def _has_dense_images(x: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return x.ndim > 1
