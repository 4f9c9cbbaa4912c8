"""One training forward of a model, from its beginning to its end.

A step is remembered when the forward of the converted model has come to its end: one that fails, because memory runs
out, say, and is tried again leaves no trace of its first attempt. A norm that runs outside of any such forward (built
by hand, or called through a part of the model) remembers at once. Within a forward a norm may run several times:
pyramid levels, siamese branches. Its calls are numbered, and each number has a history of its own.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from crossbn.torch_internals import backward_is_running


class CallSite(NamedTuple):
    """Which call of a norm it is: in which stream of batches, and the how manieth of a forward."""

    stream: str = ""
    number: int = 0


_numbers = itertools.cycle(range(1, 2**24))  # which a float32 can tell apart


class _Forward:
    """A forward of a model that has begun."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.handled = sys.exc_info()[1]
        """The exception that was being handled when it began: a retry after a failure, perhaps."""
        self.calls: dict[tuple[int, str], int] = {}
        """The number of each norm's latest call in each stream."""
        self.at_end: list[Callable[[], None]] = []
        self.read: dict[Any, Any] = {}
        self.number = next(_numbers)


class _Local(threading.local):
    forward: _Forward | None = None
    stream = ""


_local = _Local()


class Scope:
    """Hooks on a converted model that mark where its forward begins and ends; the outermost one counts.

    Attributes:
        after: what to call at the end of training forwards until it returns True, if anything.
    """

    def __init__(self, after: Callable[[], bool] | None = None) -> None:
        self.after = after

    @classmethod
    def mark_(cls, model: nn.Module, after: Callable[[], bool] | None = None) -> None:
        """Let the forwards of `model` be noticed, and those of its children, which may be called by themselves."""
        cls.unmark_(model)
        for module in (model, *(child for child in model.children() if any(True for _ in child.children()))):
            scope = cls(after if module is model else None)
            module.register_forward_pre_hook(scope.begin, prepend=True)
            module.register_forward_hook(scope.end, always_call=True)

    @classmethod
    def unmark_(cls, model: nn.Module) -> None:
        """Take the hooks away again."""
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in list(hooks.items()):
                    if isinstance(getattr(hook, "__self__", None), cls):
                        del hooks[key]
                        module._forward_hooks_always_called.pop(key, None)

    def begin(self, _: nn.Module, __: Any) -> None:
        """Forward pre-hook."""
        if torch.compiler.is_compiling() or backward_is_running():
            return
        running = _local.forward
        if running is None or running.scope is self:  # which then did not come to its end
            _local.forward = _Forward(self)

    def end(self, model: nn.Module, _: Any, __: Any) -> None:
        """Forward hook; called after a failure as well."""
        if torch.compiler.is_compiling() or backward_is_running():
            return
        forward = _local.forward
        if forward is None or forward.scope is not self:
            return
        _local.forward = None
        if sys.exc_info()[1] is not forward.handled:
            return
        for remember in forward.at_end:
            remember()
        if self.after is not None and model.training and torch.is_grad_enabled() and self.after():
            self.after = None


def at_end_of_forward(remember: Callable[[], None]) -> None:
    """Call `remember` when the running forward of a converted model has come to its end; now if there is none."""
    if _local.forward is None:
        remember()
    else:
        _local.forward.at_end.append(remember)


def read_in_forward() -> dict[Any, Any]:
    """Return what norms have read of the graph in the running forward, for others that read the same."""
    return {} if _local.forward is None else _local.forward.read


def forward_number() -> int:
    """Return the number of the running forward, from 1 on; 0 if there is none."""
    return 0 if _local.forward is None else _local.forward.number


def next_call(norm: object) -> CallSite:
    """Count a call of `norm`, and return which one it is."""
    stream, forward = _local.stream, _local.forward
    if forward is None:
        return CallSite(stream)
    key = id(norm), stream
    number = forward.calls[key] = forward.calls.get(key, -1) + 1
    return CallSite(stream, number)


@contextmanager
def stream(name: str) -> Iterator[None]:
    """Keep what is remembered inside apart from the rest: for batches of another kind in forwards of their own.

    A discriminator sees real and generated images; with BatchNorm each batch has its own statistics. Forwards inside
    `stream("generated")` are pooled with earlier ones of that name only.

    Raises:
        ValueError: if the name is empty or has a slash, a number sign or an at sign.

    Example:
        >>> import crossbn
        >>> critic = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        >>> report = crossbn.convert_(critic, window=4)
        >>> real = critic(torch.randn(2, 2))
        >>> with crossbn.stream("generated"):
        ...     fake = critic(torch.randn(2, 2) + 3)
    """
    if not isinstance(name, str) or not name or set(name) & set("/#@"):
        raise ValueError(f"the name of a stream is a word without '/', '#' or '@', got {name!r}")
    before, _local.stream = _local.stream, name
    try:
        yield
    finally:
        _local.stream = before
