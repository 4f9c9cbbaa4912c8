"""The front end for models that cannot be traced: watch one real forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from crossbn.pairing.dataflow import Parts, Recorder, Value, changed_in_place, leaves, opaque
from crossbn.pairing.untouched import untouched
from crossbn.pairing.vocabulary import is_leaf, is_norm, name_of


def watch(model: nn.Module, recorder: Recorder, example_inputs: tuple[Any, ...]) -> None:
    """Follow the calls of ``model(*example_inputs)``, in whatever mode the model is.

    Norms alone run in evaluation mode, so that one example of one position will do. Scripted submodules take no
    hooks, so what they read goes unnoticed.
    """
    watcher = _Watcher(recorder)
    watcher.remember(example_inputs, recorder.make_input(model))
    with untouched(model):
        for leaf in model.modules():
            if is_leaf(leaf) and not isinstance(leaf, torch.jit.ScriptModule):
                leaf.training = leaf.training and not is_norm(leaf)
                leaf.register_forward_pre_hook(watcher.before_leaf, prepend=True)
                leaf.register_forward_hook(watcher.after_leaf, with_kwargs=True, always_call=True)
        with watcher:
            output = model(*example_inputs)
        watcher.use_survivors()
    del output  # It lives until here, so that what it holds on to has survived.


class _Known(NamedTuple):
    """A tensor and its value, and how often it had been written to when the value had these parts."""

    tensor: Tensor  # This keeps it alive, so that no other tensor gets its id.
    value: Value
    version: int
    parts: Parts


class _Watcher(TorchFunctionMode):
    """Reports calls of functions and of leaf modules to a recorder; calls inside a leaf are its own business."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._known: dict[int, _Known] = {}
        self._leaves_entered = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._leaves_entered:
            return func(*args, **kwargs)
        values = self._values_for((args, kwargs))  # before the call, which may change its arguments
        result = func(*args, **kwargs)
        self.remember(result, self._recorder.call_function(name_of(func), *values))
        return result

    def before_leaf(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._leaves_entered += 1
        if is_norm(module) and module.running_mean is None and args and isinstance(args[0], Tensor):
            # A norm that keeps no statistics would refuse a single value per channel.
            module.running_mean = torch.zeros(module.num_features, device=args[0].device)
            module.running_var = torch.ones(module.num_features, device=args[0].device)

    def after_leaf(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._leaves_entered == 1:
            self.remember(output, self._recorder.call_module(module, *self._values_for((args, kwargs))))
        self._leaves_entered -= 1

    def use_survivors(self) -> None:
        """Record a use of what the model returned or kept, in whatever object it did so."""
        survivors = [(weakref.ref(known.tensor), known.value) for known in self._known.values()]
        self._known.clear()
        self._recorder.use(value for tensor, value in survivors if tensor() is not None)

    def remember(self, result: Any, value: Value) -> None:
        """Let `value` stand for a tensor from now on, or a copy of it for each of several tensors."""
        tensors = leaves(result, Tensor)
        for tensor in tensors:
            known = self._known.get(id(tensor))
            if known is not None and known.version == _version(tensor):
                continue  # This is the very tensor that went in, untouched, and it stays what it was.
            own = value if len(tensors) == 1 else replace(value)
            own.parts = _with_actual_shape(own.parts, tensor)
            self._known[id(tensor)] = _Known(tensor, own, _version(tensor), own.parts)

    def _values_for(self, arguments: Any) -> Any:
        return fx.node.map_aggregate(arguments, self._value_for)

    def _value_for(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        self._recorder.use([argument])  # It may be an operator's parameter.
        if id(argument) not in self._known:
            unseen = "made out of sight"
            origins = frozenset() if isinstance(argument, nn.Parameter) else frozenset({unseen})
            self.remember(argument, Value(opaque(unseen), origins))
        known = self._known[id(argument)]
        if known.version != _version(argument) and known.value.parts is known.parts:
            # It was written to, and no call that the recorder knows of has done it.
            known.value.parts = changed_in_place(known.parts, "a write out of sight")
        return known.value


def _with_actual_shape(parts: Parts, tensor: Tensor) -> Parts:
    """Add what a real tensor tells: its width, and whether its channels are where a norm expects them."""
    if len(parts) > 1:
        return parts
    part, channels = parts[0], tensor.shape[1] if tensor.ndim > 1 else None
    if part.direct and part.dimensions != tensor.ndim:
        return opaque(f"{part.reason} on {tensor.ndim} dimensions", channels)
    return (replace(part, channels=channels),) if part.channels is None else parts


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
