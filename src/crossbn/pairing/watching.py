"""The front end for models that cannot be traced: watch one real forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from crossbn.pairing.calls import Call, changed_in_place, function_name
from crossbn.pairing.description import Description, Opaque, Operator
from crossbn.pairing.ledger import Ledger
from crossbn.pairing.modules import is_leaf, is_norm
from crossbn.pairing.untouched import untouched
from crossbn.pairing.value import Value, leaves


def watch(model: nn.Module, example_inputs: tuple[Any, ...], operators: Collection[nn.Module] = ()) -> Ledger:
    """Follow the calls of ``model(*example_inputs)``, in whatever mode the model is.

    Norms alone run in evaluation mode, so that one example of one position will do. Scripted submodules take no
    hooks, so what they read goes unnoticed.
    """
    ledger = Ledger(model, operators)
    watcher = _Watcher(ledger, example_inputs)
    handles = []
    with untouched(model):
        try:
            for leaf in model.modules():
                if not is_leaf(leaf) or isinstance(leaf, torch.jit.ScriptModule):
                    continue
                if is_norm(leaf):
                    leaf.training = False
                handles.append(leaf.register_forward_pre_hook(watcher.before_leaf, prepend=True))
                handles.append(leaf.register_forward_hook(watcher.after_leaf, with_kwargs=True, always_call=True))
            with watcher:
                output = model(*example_inputs)
            watcher.count_survivors()
        finally:
            for handle in handles:
                handle.remove()
    del output  # kept until here: what it holds on to has survived
    return ledger


@dataclass(frozen=True)
class _Sight:
    """A tensor, kept alive so that its id stays its own, and its value; write count and description as first seen."""

    tensor: Tensor
    version: int
    value: Value
    description: Description


class _Watcher(TorchFunctionMode):
    """Reports calls of functions and of leaf modules to a ledger; calls inside a leaf are its own business."""

    def __init__(self, ledger: Ledger, example_inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self._ledger = ledger
        self._sights: dict[int, _Sight] = {}
        self._leaves_entered = 0
        for example in leaves(example_inputs):
            source = "input of the model"
            self._remember(example, Value(Opaque(source), origins=frozenset({source})))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._leaves_entered:
            return func(*args, **kwargs)
        # Before the call, which may change its arguments.
        call = Call(function_name(func), self._values_for(args), self._values_for(kwargs))
        result = func(*args, **kwargs)
        self._remember(result, self._ledger.function_called(call))
        return result

    def before_leaf(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of a leaf module."""
        self._leaves_entered += 1
        if is_norm(module) and module.running_mean is None and args and isinstance(args[0], Tensor):
            _give_statistics(module, args[0].device)

    def after_leaf(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of a leaf module."""
        if self._leaves_entered == 1:
            value = self._ledger.module_called(module, self._values_for((args, kwargs)))
            self._remember(output, value)
        self._leaves_entered -= 1

    def count_survivors(self) -> None:
        """Count as read, once more, what the model returned or kept, in whatever object it did so."""
        survivors = [(weakref.ref(sight.tensor), sight.value) for sight in self._sights.values()]
        self._sights.clear()
        for tensor, value in survivors:
            if tensor() is not None:
                value.readers += 1

    def _values_for(self, arguments: Any) -> Any:
        return fx.node.map_aggregate(arguments, self._value_for)

    def _value_for(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        if isinstance(argument, nn.Parameter):
            self._ledger.parameter_read(argument)
        sight = self._sights.get(id(argument))
        if sight is None:
            unseen = "made out of sight"
            origins = frozenset({unseen}) if not isinstance(argument, nn.Parameter) else frozenset()
            self._remember(argument, Value(Opaque(unseen), origins=origins))
            return self._sights[id(argument)].value
        if sight.version != _version(argument) and sight.value.description is sight.description:
            # Written to, and no call that the ledger knows of has done it.
            sight.value.description = changed_in_place(sight.description, "a write out of sight")
        return sight.value

    def _remember(self, result: Any, value: Value) -> None:
        if isinstance(result, list | tuple):
            for each in result:
                self._remember(each, Value(value.description, view_of=value.view_of, origins=value.origins))
        if not isinstance(result, Tensor):
            return
        known = self._sights.get(id(result))
        if known is not None and known.version == _version(result):
            return  # the very tensor that went in, untouched: it stays what it was
        value.description = _with_actual_shape(value.description, result)
        self._sights[id(result)] = _Sight(result, _version(result), value, value.description)


def _with_actual_shape(description: Description, tensor: Tensor) -> Description:
    """Use what a real tensor tells: its width, and whether its channels are where a norm expects them."""
    channels = tensor.shape[1] if tensor.ndim > 1 else None
    if isinstance(description, Operator) and description.dimensions != tensor.ndim:
        return Opaque(f"{description.name} on {tensor.ndim} dimensions", channels)
    if isinstance(description, Opaque) and description.channels is None:
        return replace(description, channels=channels)
    return description


def _give_statistics(norm: _BatchNorm, device: torch.device) -> None:
    """Let a norm that keeps no statistics run on a single value per channel, which it would refuse."""
    norm.running_mean = torch.zeros(norm.num_features, device=device)
    norm.running_var = torch.ones(norm.num_features, device=device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
