"""What every tensor of a traced forward is made of, followed from call to call, and what torch's functions do to it."""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx, nn
from torch.nn import modules

from crossbn.functional import LINEAR_OPERATORS, is_linear_operator
from crossbn.torch_internals import BatchNormBase

LeafT = TypeVar("LeafT")

# fmt: off
_METADATA = {
    "device", "dim", "dtype", "get_device", "is_complex", "is_contiguous", "is_cuda", "is_floating_point",
    "layout", "len", "ndim", "ndimension", "nelement", "numel", "requires_grad", "shape", "size", "stride",
}
"""The call touches no element, so it does not count as a use of the operand."""

_SYNONYMS = {
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_",
    "concat": "cat", "concatenate": "cat",
}
# fmt: on


def name_of(called: str | type[nn.Module] | Callable[..., Any]) -> str:
    """Return the name under which a tensor method, a module's type or a function is known here.

    A module's type is spelled like torch's functions, and a Python operator like the tensor method that does its work.
    A function from outside torch gets a name of two words, which means nothing here, whatever the function is called.
    """
    if isinstance(called, type) and issubclass(called, nn.Module):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", called.__name__).lower()
    name = called if isinstance(called, str) else str(getattr(called, "__name__", called))
    package = (getattr(called, "__module__", None) or "torch").partition(".")[0]
    if not isinstance(called, str) and package not in {"torch", "_operator", "builtins"}:
        return f"function {name}"
    bare = name.strip("_") if name.startswith("__") else name
    return _SYNONYMS.get(bare, bare)


_FAMILIES = (modules.activation, modules.dropout, modules.padding, modules.pooling, modules.upsampling)
_OTHERS = {"clamp", "feature_dropout", "interpolate", "logsigmoid", "upsample", "lp_pool1d", "lp_pool2d", "lp_pool3d"}
KEEP_CHANNELS = _OTHERS | {
    name_of(kind)
    for family in _FAMILIES
    for kind in vars(family).values()
    if isinstance(kind, type) and kind not in (nn.GLU, nn.MultiheadAttention)
}
"""Activations, poolings and the like: their result is no operator's output, and as wide as their operand."""


def holds_norm(module: nn.Module) -> bool:
    """Tell whether the module is a batch norm or has one inside."""
    return any(isinstance(inner, BatchNormBase) for inner in module.modules())


def is_torch_module(module: nn.Module) -> bool:
    """Tell whether the module's type is torch's own, so that its name says what it does."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a call of the module counts as one step, whatever is called inside."""
    if isinstance(module, BatchNormBase | torch.jit.ScriptModule):
        return True
    built_in = is_torch_module(module) and not isinstance(module, nn.Sequential)
    return (built_in or isinstance(module, LINEAR_OPERATORS)) and not holds_norm(module)


@dataclass(frozen=True)
class Segment:
    """A run of channels of a tensor: a sum of linear operators' outputs and perhaps of something else, or neither.

    Attributes:
        channels: Width of the run; 0 where it is not known, which a norm's input has none of.
        producers: Qualified names of the linear operators summed into it; empty if there are none.
        complete: The run is nothing but the sum of its producers' outputs.
        reason: One phrase for people, such as ``conv1``, ``conv1 + conv2 + rest`` or ``after max_pool2d``.
        final: Nothing more is to be found: there are producers, or a closer look would find none either.
    """

    channels: int
    producers: tuple[str, ...]
    complete: bool
    reason: str
    final: bool = field(default=True, compare=False)

    @property
    def direct(self) -> bool:
        """Whether the run is the output of its one producer as it is."""
        return self.complete and len(self.producers) == 1


Segments: TypeAlias = tuple[Segment, ...]
"""What a tensor is made of: one segment, or several side by side along the channels."""


def sum_of(producers: tuple[str, ...], channels: int, complete: bool) -> Segments:
    """Describe a sum of operators' outputs, and of something else if it is not complete."""
    reason = " + ".join(producers if complete else (*producers, "rest"))
    return (Segment(channels, producers, complete, reason),)


def opaque(reason: str, channels: int = 0, final: bool = False) -> Segments:
    """Describe what no operator is known to have made."""
    return (Segment(channels, (), False, reason, final),)


@dataclass(eq=False)
class Value:
    """One tensor of a forward."""

    segments: Segments  # what it is made of now: a write in place changes it
    view_of: Value | None = None  # the value whose memory it may share

    def overwrite(self, segments: Segments) -> None:
        """Take note of a write in place, which changes what this value is a view of as well."""
        self.segments = segments
        if (base := self.view_of) is not None:
            base.overwrite(_changed_in_place(base.segments, "a write to a view of it"))


class Findings:
    """What forwards of a model, or of parts of it, have shown.

    Attributes:
        names: Of the modules, by id; the first if a module has two.
        operators: The linear operators, by name.
        norm_inputs: What each norm has read, call by call.
        operator_calls: How often each operator was called.
        operator_uses: How often its output, or one of its parameters outside of it, was used.
    """

    def __init__(self, model: nn.Module, operators: Collection[nn.Module] = ()) -> None:
        trusted = {id(module) for module in operators}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.operators = {
            name: module
            for name, module in model.named_modules()
            if id(module) in trusted or (is_linear_operator(module) and is_leaf(module))
        }
        self.norm_inputs: defaultdict[str, list[Segments]] = defaultdict(list)
        self.operator_calls: Counter[str] = Counter()
        self.operator_uses: Counter[str] = Counter()


def leaves(nest: Any, kind: type[LeafT]) -> list[LeafT]:
    """Return the leaves of a kind in a nest of lists, tuples, dicts and slices, in order."""
    found: list[Any] = []
    fx.node.map_aggregate(nest, found.append)
    return [leaf for leaf in found if isinstance(leaf, kind)]


def interpret(graph: fx.Graph, root: nn.Module, findings: Findings) -> None:
    """Add to the findings what the traced graph of a model, or of a part of it, tells."""
    interpreter = _Interpreter(root, graph, findings)
    interpreter.run()
    stored = leaves([vars(module) for module in root.modules()], fx.Proxy)  # intermediate results the model has kept
    interpreter.use(interpreter.env[proxy.node] for proxy in stored if proxy.node in interpreter.env)


class _Interpreter(fx.Interpreter):
    """Runs a graph, in the order of execution, with a `Value` in the place of every tensor."""

    def __init__(self, root: nn.Module, graph: fx.Graph, findings: Findings) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self._findings = findings
        self._owners = {id(p): name for name, module in findings.operators.items() for p in module.parameters()}

    def use(self, values: Iterable[Value]) -> None:
        used = (segment for value in values for segment in value.segments)
        self._findings.operator_uses.update(name for segment in used for name in segment.producers)

    def placeholder(self, *_: Any) -> Value:
        name = self._findings.names[id(self.module)]
        return Value(opaque(f"input of {name or 'the model'}", final=not name))

    def get_attr(self, target: Any, *_: Any) -> Value:
        owner = self._owners.get(id(operator.attrgetter(target)(self.module)))
        self._findings.operator_uses.update([owner] if owner is not None else [])
        return Value(opaque(f"attribute {target}"))

    def output(self, _: Any, args: Any, __: Any) -> None:
        self.use(leaves(args, Value))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Value:
        module, findings = self.module.get_submodule(target), self._findings
        name, kind = findings.names[id(module)], name_of(type(module))
        is_known = isinstance(module, BatchNormBase) or name in findings.operators
        if is_torch_module(module) and not is_known:
            # It does what the function of that name does with the module's settings.
            settings = {key: getattr(module, key) for key in ("p", "training", "inplace") if hasattr(module, key)}
            return self._call(kind, args, {**kwargs, **settings})
        operands = leaves((args, kwargs), Value)
        self.use(operands)
        if isinstance(module, BatchNormBase):
            findings.norm_inputs[name].append(operands[0].segments if operands else opaque("not given as a tensor"))
            return Value(opaque(f"after {kind}", module.num_features, final=True))
        if name in findings.operators:
            findings.operator_calls[name] += 1
            # Not by weight.shape: reading a parametrized weight computes it, which may move its state.
            channels: Any = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            return Value(sum_of((name,), channels, complete=True))
        return Value(opaque(f"after {kind}"))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Value:
        return self._call(name_of(args[1] if target is getattr else target), args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Value:
        return self._call(name_of(target), args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Value:
        operands = leaves((args, kwargs), Value)
        if not operands or name in _METADATA:
            return Value(opaque(f"after {name}"))
        switched_off = "dropout" in name and (kwargs.get("p") == 0 or kwargs.get("training") is False)
        if switched_off or name in ("contiguous", "identity"):
            return operands[0]
        first = operands[0].segments
        is_zero = name == "add" and any(type(arg) in (int, float) and arg == 0 for arg in args)  # sum() begins with it
        if is_zero or name == "clone":
            return Value(first)  # Copying is no use; to read the copy is one.
        self.use(operands)
        made = _COMBINATIONS[name](*args, **kwargs) if name in _COMBINATIONS else None
        final = name in KEEP_CHANNELS
        in_place = name.endswith("_") or name == "setitem" or kwargs.get("inplace") is True
        target = kwargs.get("out", operands[0] if in_place else None)
        if isinstance(target, Value):
            target.overwrite(made or _changed_in_place(target.segments, name, final))
            return target
        if made or final:
            return Value(made or opaque(f"after {name}", _width(first), final))
        # One of several results, or a slice, is made of what the whole is made of; its width is another.
        sliced = name == "getitem" and len(first) == 1 and not first[0].producers
        # Whatever else the function is, its result may be the operand's memory in another shape or type.
        return Value(opaque(first[0].reason if sliced else f"after {name}"), view_of=operands[0])


def _changed_in_place(segments: Segments, by: str, final: bool = False) -> Segments:
    return opaque(f"changed in place by {by.rstrip('_')}", _width(segments), final)


def _width(segments: Segments) -> int:
    widths = [segment.channels for segment in segments]
    return sum(widths) if all(widths) else 0


def _concatenate(tensors: Any, dim: Any = 0, **options: Any) -> Segments:
    """Describe the result of ``torch.cat`` with these arguments."""
    dim = options.get("axis", dim)
    if not isinstance(tensors, list | tuple) or not all(isinstance(each, Value) for each in tensors):
        return opaque("after cat")
    # How many dimensions there are is not known, so a negative one may be any.
    return tuple(s for t in tensors for s in t.segments) if dim == 1 else opaque(f"after cat along dimension {dim}")


def _add(input: Any, other: Any, alpha: Any = 1, **_: Any) -> Segments | None:  # noqa: A002  # torch's name
    """Describe the result of ``torch.add`` with these arguments; None if it is no plain sum of tensors."""
    if not isinstance(input, Value) or not isinstance(other, Value) or alpha != 1:
        return None
    terms = [opaque("", _width(v.segments))[0] if len(v.segments) > 1 else v.segments[0] for v in (input, other)]
    widths = {term.channels for term in terms if term.channels}
    if len(widths) > 1:
        return opaque("after add with broadcast channels", max(widths))
    producers = tuple(name for term in terms for name in term.producers)
    # An operator's output that is added twice has another gradient than one occurrence, so the sum is opaque.
    if not producers or len(set(producers)) < len(producers):
        return opaque("after add", max(widths, default=0))
    return sum_of(producers, max(widths), all(term.complete for term in terms))


_COMBINATIONS: dict[str, Callable[..., Segments | None]] = {"add": _add, "add_": _add, "cat": _concatenate}
