"""Telling a training forward from its recomputation, and giving both the same statistics.

Activation checkpointing runs a forward again inside backward. By then the history has moved on, so what a
norm used the first time is kept, owned by the autograd graph: it lives exactly as long as the graph that may
need it, and the norm itself only has a weak reference.
"""

import sys
import weakref
from collections.abc import Iterable
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor


class Pass(Enum):
    """What a forward in training mode is."""

    TRAIN = "it is remembered"
    LOOK = "gradients are off: nothing is remembered"
    REPLAY = "it happens inside backward: an earlier one is repeated"


def current_pass() -> Pass:
    """Tell which kind of training forward is running."""
    if torch.compiler.is_compiling():  # a compiled graph recomputes without running this code again
        return Pass.TRAIN if torch.is_grad_enabled() else Pass.LOOK
    if torch._C._current_graph_task_id() != -1:
        return Pass.REPLAY
    return Pass.TRAIN if torch.is_grad_enabled() or _enclosing_function() is not None else Pass.LOOK


def may_be_replayed() -> bool:
    """Tell whether the running forward lies in a region that backward may compute again."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _enclosing_function() -> Any:
    """Return the context of the `autograd.Function` whose forward is running, if any.

    Reentrant checkpointing, torch's and others', runs the first forward without gradients inside such a Function,
    which no flag of torch distinguishes from `no_grad`; the call stack does. Only looked at without gradients.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            context = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(context, torch.autograd.function.FunctionCtx):
                return context
        frame = frame.f_back
    return None


class Record:
    """What one forward used: the batch's mean, by which the repetition is recognised, and the statistics."""

    def __init__(self, mean: Tensor, statistics: Any) -> None:
        self.mean = mean
        self.statistics = statistics

    def keep_with(self, y: Tensor) -> None:
        """Tie the record's life to the graph that will replay the forward whose output is `y`."""
        node: Any = _enclosing_function() if y.grad_fn is None else y.grad_fn
        if node is not None:
            node.metadata.setdefault("crossbn", []).append(self)


class Ledger:
    """The records of a norm that are still alive."""

    def __init__(self) -> None:
        self._records: weakref.WeakSet[Record] = weakref.WeakSet()

    def add(self, record: Record, y: Tensor) -> None:
        """Note what the forward with output `y` used."""
        record.keep_with(y)
        self._records.add(record)

    def find(self, mean: Tensor) -> Record | None:
        """Return the record of the forward whose batch had this mean: the nearest, as kernels may round anew."""
        records: Iterable[Record] = self._records
        return min(records, key=lambda record: float((record.mean - mean).abs().sum()), default=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ledger, ()  # a copy has no graph
