"""The front end that needs no data: torch.fx traces of the model, or of its largest traceable parts."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from crossbn.pairing.dataflow import Recorder, Value, leaves, opaque
from crossbn.pairing.untouched import untouched
from crossbn.pairing.vocabulary import holds_norm, is_leaf, name_of


def trace(model: nn.Module, recorder: Recorder, in_training: bool) -> bool:
    """Follow the calls of a model's forward symbolically, and return whether it could be traced as a whole.

    Where not, each of its largest traceable parts is traced alone, and its inputs are opaque.
    """
    with untouched(model):
        for module in model.modules():
            # A training forward reaches heads that are used in training only. Dropouts keep their mode: one that is
            # switched off is looked through.
            if not isinstance(module, _DropoutNd | torch.jit.ScriptModule):
                module.training = in_training
        return _trace_largest_parts(model, recorder)


def _trace_largest_parts(module: nn.Module, recorder: Recorder) -> bool:
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
            _trace_largest_parts(child, recorder)
        return False
    _replay(graph, module, recorder)
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


def _replay(graph: fx.Graph, root: nn.Module, recorder: Recorder) -> None:
    """Report a traced graph to the recorder, node by node in the order of execution."""
    values: dict[fx.Node, Any] = {}  # a Value each, which is more than torch.fx types as an argument
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = recorder.make_input(root)
        elif node.op == "get_attr":
            recorder.use([operator.attrgetter(node.target)(root)])
            values[node] = Value(opaque(f"attribute {node.target}"))
        elif node.op == "call_module":
            values[node] = recorder.call_module(root.get_submodule(node.target), args, kwargs)
        elif node.op == "output":
            recorder.use(leaves(args, Value))
        else:
            called = node.args[1] if node.target is getattr else node.target
            values[node] = recorder.call_function(name_of(called), args, kwargs)
    stored = leaves([vars(module) for module in root.modules()], fx.Proxy)  # intermediate results the model has kept
    recorder.use(values[proxy.node] for proxy in stored if proxy.node in values)
