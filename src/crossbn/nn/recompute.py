"""Telling a training forward from its recomputation, and giving both the same statistics.

Activation checkpointing runs a forward again inside backward. By then the history has moved on, so what a
norm used the first time is kept, owned by the autograd graph: it lives exactly as long as the graph that may
need it, and the norm itself only has a weak reference.
"""

import sys
import weakref
from collections.abc import Iterator
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from crossbn.torch_internals import backward_is_running, saved_tensor_hooks


class Pass(Enum):
    """What a forward in training mode is."""

    TRAIN = "it is remembered"
    LOOK = "gradients are off: nothing is remembered"
    RECOMPUTE = "it happens inside backward: an earlier one is repeated"


def current_pass() -> Pass:
    """Tell which kind of training forward is running."""
    if torch.compiler.is_compiling():  # a compiled graph recomputes without running this code again
        return Pass.TRAIN if torch.is_grad_enabled() else Pass.LOOK
    if backward_is_running():
        return Pass.RECOMPUTE
    return Pass.TRAIN if torch.is_grad_enabled() or _enclosing_function("forward") is not None else Pass.LOOK


def may_be_recomputed() -> bool:
    """Tell whether the running forward lies in a region that backward may compute again."""
    return not torch.is_grad_enabled() or saved_tensor_hooks() is not None


def _callers(name: str) -> Iterator[FrameType]:
    """Yield the running functions of that name, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == name:
            yield frame
        frame = frame.f_back


def _enclosing_function(method: str) -> Any:
    """Return the context of the recorded `autograd.Function` whose forward (or backward) is running, if any.

    Reentrant checkpointing, torch's and others', runs the first forward without gradients inside such a Function,
    which no flag of torch distinguishes from `no_grad`; the call stack does. Only looked at without gradients.
    """
    for frame in _callers(method):
        if frame.f_code.co_argcount:
            context = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(context, torch.autograd.function.FunctionCtx) and context.next_functions:  # type: ignore[attr-defined]
                return context
    return None


def _region() -> int | None:
    """Identify the checkpointed region that runs, the same at first and again; None where torch does not tell."""
    if not backward_is_running():
        if not torch.is_grad_enabled():
            return id(_enclosing_function("forward"))
        hooks = saved_tensor_hooks()
        closure = getattr(hooks[0], "__closure__", None) or () if hooks else ()
        cells = dict(zip(hooks[0].__code__.co_freevars, closure, strict=True)) if hooks and closure else {}
        return id(cells["frame"].cell_contents) if "frame" in cells else None
    replaying = next(_callers("unpack_hook"), None)
    if replaying is not None and "frame" in replaying.f_locals:
        return id(replaying.f_locals["frame"])
    context = _enclosing_function("backward")
    return None if context is None else id(context)


class Record:
    """What one forward used, and by what its repetition is recognised."""

    def __init__(self, mean: Tensor, used: Any) -> None:
        self.mean, self.used, self.region = mean, used, _region()


class RecomputeCache:
    """The records of a norm that are still alive."""

    def __init__(self) -> None:
        self._records: weakref.WeakSet[Record] = weakref.WeakSet()

    def add(self, record: Record, y: Tensor) -> None:
        """Note what the forward with output `y` used, for as long as the graph lives that will replay it."""
        node: Any = _enclosing_function("forward") if y.grad_fn is None else y.grad_fn
        if node is not None:
            node.metadata.setdefault("crossbn records", []).append(record)
            self._records.add(record)

    def find(self, mean: Tensor) -> Record | None:
        """Return the record of the forward that is being repeated.

        It is of the same region, and its batch had this mean: the nearest, as kernels may round anew.
        """
        region = _region()
        records = [record for record in self._records if record.region == region] or list(self._records)
        return min(records, key=lambda record: float((record.mean - mean).abs().sum()), default=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecomputeCache, ()  # a copy has no graph
