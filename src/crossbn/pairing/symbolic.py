"""The front end that needs no data: torch.fx traces of the model, or of its largest traceable parts."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx, nn

from crossbn.pairing.calls import Call, function_name, method_name
from crossbn.pairing.description import Opaque
from crossbn.pairing.ledger import Ledger
from crossbn.pairing.modules import holds_norm, is_dropout, is_leaf
from crossbn.pairing.untouched import untouched
from crossbn.pairing.value import Value, leaves, values_in


def trace(model: nn.Module, operators: Collection[nn.Module] = (), in_training: bool = True) -> tuple[Ledger, bool]:
    """Follow the calls of a model's forward symbolically.

    Returns:
        The ledger, and whether the model could be traced as a whole. Where not, each of its largest traceable
        parts has been traced alone, and its inputs are opaque.
    """
    ledger = Ledger(model, operators)
    with untouched(model):
        for module in model.modules():
            # So that heads used in training only are reached. Dropouts stay as they are: one that is switched
            # off is looked through.
            if not is_dropout(module) and not isinstance(module, torch.jit.ScriptModule):
                module.training = in_training
        whole = _follow(model, ledger)
    return ledger, whole


def _follow(module: nn.Module, ledger: Ledger) -> bool:
    if is_leaf(module) or not holds_norm(module):
        return False
    tracer = _Tracer(param_shapes_constant=True)
    try:
        graph = tracer.trace(module, concrete_args=_defaults(module))
    except Exception:
        # Model code that needs real tensors fails in ways of its own, so any error means "not traceable".
        for child in module.children():
            _follow(child, ledger)
        return False
    _replay(graph, module, ledger)
    return True


def _recorder(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
    def record(proxy: fx.Proxy, *operands: Any) -> fx.Proxy:
        return proxy.tracer.create_proxy("call_function", function, (proxy, *operands), {})

    return record


class _Proxy(fx.Proxy):
    """Records in-place operators as such; torch.fx would take ``x += y`` for ``x = x + y``."""

    __iadd__ = _recorder(operator.iadd)
    __isub__ = _recorder(operator.isub)
    __imul__ = _recorder(operator.imul)
    __itruediv__ = _recorder(operator.itruediv)
    __ipow__ = _recorder(operator.ipow)
    __setitem__ = _recorder(operator.setitem)


class _Tracer(fx.Tracer):
    """Stops at norms and linear operators, whoever wrote them, and enters modules made on the fly."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return is_leaf(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # torch.fx refuses a module that is not in the model, such as nn.ReLU() made inside forward.
        if m not in (self.submodule_paths or {}):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def _defaults(module: nn.Module) -> dict[str, object]:
    """Options of forward with their defaults: they are best traced as they usually are."""
    _, *options = list(inspect.signature(type(module).forward).parameters.values())[1:]  # the first is the data
    return {option.name: option.default for option in options if option.default is not inspect.Parameter.empty}


def _replay(graph: fx.Graph, root: nn.Module, ledger: Ledger) -> None:
    """Report a traced graph to the ledger, node by node in the order of execution."""
    values: dict[fx.Node, Any] = {}  # a Value each, which is more than torch.fx types as an argument
    source = f"input of {ledger.name_of(root) or 'the model'}"
    for node in graph.nodes:
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        if node.op == "placeholder":
            values[node] = Value(Opaque(source, final=not ledger.name_of(root)), origins=frozenset({source}))
        elif node.op == "get_attr":
            values[node] = _read_attribute(root, node.target, ledger)
        elif node.op == "call_module":
            values[node] = ledger.module_called(root.get_submodule(node.target), (args, kwargs))
        elif node.op == "output":
            for value in values_in(args):
                value.readers += 1
        else:
            values[node] = ledger.function_called(Call(_called_name(node), args, kwargs))
    for kept in leaves([vars(module) for module in root.modules()]):
        if isinstance(kept, fx.Proxy) and kept.node in values:  # the model stored an intermediate result
            values[kept.node].readers += 1


def _called_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return method_name(node.target)
    if node.target is getattr:
        return method_name(str(node.args[1]))
    return function_name(node.target)


def _read_attribute(root: nn.Module, target: str, ledger: Ledger) -> Value:
    owner, _, name = target.rpartition(".")
    attribute = getattr(root.get_submodule(owner), name)
    if isinstance(attribute, nn.Parameter):
        ledger.parameter_read(attribute)
    return Value(Opaque(f"attribute {target}"))
