"""Running a model's forward to see what it does, by torch.fx or on an example, and leaving nothing behind."""

from __future__ import annotations

import copy
import inspect
import operator
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from crossbn.pairing.dataflow import Findings, Segments, holds_norm, interpret, is_leaf, leaves, opaque, sum_of
from crossbn.pairing.graph import Part, read_calls
from crossbn.torch_internals import BatchNormBase


def trace(model: nn.Module, findings: Findings, in_training: bool) -> bool:
    """Follow the calls of a model's forward symbolically, and return whether it could be traced as a whole.

    Where not, each of its largest traceable parts is traced alone, and its inputs are opaque.
    """
    with untouched(model):
        for module in model.modules():
            # A training forward reaches heads that are used in training only. Dropouts keep their mode: one that is
            # switched off is looked through.
            if not isinstance(module, _DropoutNd | torch.jit.ScriptModule):
                module.training = in_training
        return _trace_largest_parts(model, findings)


def _trace_largest_parts(module: nn.Module, findings: Findings) -> bool:
    if is_leaf(module) or not holds_norm(module):
        return False
    # The first argument of forward is the data; options are best traced with their defaults.
    options = list(inspect.signature(type(module).forward).parameters.values())[2:]
    defaults = {option.name: option.default for option in options if option.default is not inspect.Parameter.empty}
    try:
        graph = _Tracer(param_shapes_constant=True).trace(module, concrete_args=defaults)
    except Exception:
        # Model code that needs real tensors fails in ways of its own, so any error means "not traceable".
        for child in module.children():
            _trace_largest_parts(child, findings)
        return False
    interpret(graph, module, findings)
    return True


def _recording(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
    return lambda proxy, *operands: proxy.tracer.create_proxy("call_function", function, (proxy, *operands), {})


class _Proxy(fx.Proxy):
    """Records in-place operators as such; torch.fx would take ``x += y`` for ``x = x + y``."""

    __iadd__ = _recording(operator.iadd)
    __isub__ = _recording(operator.isub)
    __imul__ = _recording(operator.imul)
    __itruediv__ = _recording(operator.itruediv)
    __ipow__ = _recording(operator.ipow)
    __setitem__ = _recording(operator.setitem)


class _Tracer(fx.Tracer):
    """Stops at norms and linear operators, whoever wrote them, and enters modules made on the fly."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return is_leaf(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # torch.fx refuses a module that is not in the model, such as nn.ReLU() made inside forward.
        known = m in (self.submodule_paths or {})
        return super().call_module(m, forward, args, kwargs) if known else forward(*args, **kwargs)


def watch(model: nn.Module, findings: Findings, example_inputs: tuple[Any, ...]) -> None:
    """Read from the autograd graph of ``model(*example_inputs)``, in whatever mode the model is, what feeds its norms.

    Norms do nothing meanwhile, so that one example of one position will do.
    """
    made_by: dict[Any, str] = {}  # by the graph's node: which operator's call it is

    def see_operator(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        findings.operator_calls[name] += 1
        made_by[output.grad_fn] = name

    def stand_in(norm: BatchNormBase, *args: Any, **kwargs: Any) -> Tensor:
        if not (tensors := leaves((args, kwargs), Tensor)):
            return type(norm).forward(norm, *args, **kwargs)  # It is given an object of the user's own.
        x = tensors[0]
        segments = tuple(segment for part in read_calls(x) for segment in _with_names(part, made_by))
        findings.norm_inputs[findings.names[id(norm)]].append(segments)
        zeros = torch.zeros(norm.num_features, dtype=x.dtype, device=x.device)
        return F.batch_norm(x, zeros, zeros + 1)

    flags = {parameter: parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point()}
    with untouched(model), torch.enable_grad(), ExitStack() as stack:
        for module in (module for module in model.modules() if isinstance(module, BatchNormBase)):
            vars(module)["forward"] = partial(stand_in, module)
        for name, module in findings.operators.items():
            module.register_forward_hook(partial(see_operator, name))
        for parameter, flag in flags.items():
            stack.callback(parameter.requires_grad_, flag)
            parameter.requires_grad_()
        with _Readers() as readers:
            output = model(*example_inputs)
        kept = leaves([output, *(vars(module) for module in model.modules())], Tensor)
        readers.note([tensor for tensor in kept if tensor.grad_fn is not None])
    # What else an object of the user's own holds is not known: then nothing has one reader only.
    unknown = any(not isinstance(leaf, Tensor | str | int | float | None) for leaf in leaves(output, object))
    for node, name in made_by.items():
        # A parametrization may read its parameters as often as it likes.
        own = findings.operators[name].parameters(recurse=False)
        elsewhere = sum(max(readers.counts[parameter] - 1, 0) for parameter in own)
        findings.operator_uses[name] += readers.counts[node] + elsewhere + unknown


def _with_names(part: Part, made_by: Mapping[Any, str]) -> Segments:
    names = tuple(made_by.get(call.node, "") for call in part.calls)
    if names and all(names):
        return sum_of(names, part.channels, part.complete)
    return opaque(part.reason, part.channels, final=not names)


class _Readers(TorchFunctionMode):
    """Counts how often each tensor is read: by the node of the graph that has made it, a parameter by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if leaves(result, Tensor):  # A look at the shape is no reading.
            self.note([each for each in leaves((args, kwargs), Tensor) if each is not result])
        return result

    def note(self, tensors: list[Tensor]) -> None:
        self.counts.update(tensor if tensor.grad_fn is None else tensor.grad_fn for tensor in tensors)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Let the model's code run without lasting effect on attributes, buffers, hooks, random state and warnings.

    Inside, buffers are copies, so the model's own are never written to. Afterwards every module has the attributes it
    had before, training flags included, and no hook that was added inside. Scripted submodules are not covered: they
    keep their state out of reach.
    """
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}  # A buffer shared by two modules stays shared.
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:  # Its state can only change if something has imported it.
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.no_grad())
        warnings.simplefilter("ignore")
        for module in [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]:
            stack.callback(vars(module).update, dict(vars(module)))
            stack.callback(vars(module).clear)  # This runs first: the last callback is the first to be called.
            hooks = {key: copy.copy(value) for key, value in vars(module).items() if key.startswith("_forward_")}
            buffers = {name: copies.get(id(buffer)) for name, buffer in module._buffers.items()}
            vars(module).update(hooks, _buffers=buffers)
        yield
