"""What every tensor of a forward is made of, followed from call to call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from crossbn.functional import is_linear_operator
from crossbn.pairing import vocabulary
from crossbn.pairing.vocabulary import name_of


@dataclass(frozen=True)
class Part:
    """A run of channels: a sum of linear operators' outputs and perhaps of something else, or something opaque.

    Attributes:
        channels: Width of the run, None where it is unknown.
        reason: One phrase for people: the addends, or what is there instead of an operator's output.
        operators: Qualified names of the operators that are summed into the run; none if it is opaque.
        complete: The run is nothing but the sum of these operators' outputs.
        final: A closer look would find no other operator.
        dimensions: How many dimensions the tensor has, batch and channels included, where an operator tells.
    """

    channels: int | None
    reason: str
    operators: tuple[str, ...] = ()
    complete: bool = False
    final: bool = False
    dimensions: int | None = None

    @property
    def direct(self) -> bool:
        """Whether the run is one operator's output as it is."""
        return self.complete and len(self.operators) == 1


Parts: TypeAlias = tuple[Part, ...]
"""What a tensor is made of: one part, or several side by side along the channels."""


@dataclass(eq=False)
class Value:
    """One tensor of a forward.

    Attributes:
        parts: What it is made of now; a write in place changes it.
        origins: Names of the norms and operators that it is computed from without another of them in between, and
            "input of ..." for what comes from outside.
        view_of: The value whose memory it may share.
    """

    parts: Parts
    origins: frozenset[str] = frozenset()
    view_of: Value | None = None

    def overwrite(self, parts: Parts, origins: frozenset[str]) -> None:
        """Take note of a write in place, which every value that this one is a view of sees as well."""
        self.parts, self.origins = parts, origins
        base = self.view_of
        while base is not None:
            base.parts = changed_in_place(base.parts, "a write to a view of it")
            base.origins |= origins
            base = base.view_of


def leaves(nest: Any) -> list[Any]:
    """Return the leaves of a nest of lists, tuples, dicts and slices, in order."""
    found: list[Any] = []
    fx.node.map_aggregate(nest, found.append)
    return found


def values_in(nest: Any) -> list[Value]:
    """Return the values among the leaves of a nest."""
    return [leaf for leaf in leaves(nest) if isinstance(leaf, Value)]


def opaque(reason: str, channels: int | None = None, final: bool = False) -> Parts:
    """Describe a tensor that is no operator's output."""
    return (Part(channels, reason, final=final),)


def width(parts: Parts) -> int | None:
    """Return the number of channels, None if it is unknown for any part."""
    known = [part.channels for part in parts if part.channels is not None]
    return sum(known) if len(known) == len(parts) else None


def changed_in_place(parts: Parts, by: str, final: bool = False) -> Parts:
    """Describe a tensor after a write to it."""
    return opaque(f"changed in place by {by.rstrip('_')}", width(parts), final)


def concatenate(operands: Sequence[Parts], dim: int) -> Parts:
    """Describe ``torch.cat(operands, dim)``."""
    parts = tuple(part for operand in operands for part in operand)
    dimensions = {part.dimensions for part in parts if part.dimensions is not None}
    # A negative dimension counts from the end, and only the operators tell how many dimensions there are.
    if dim == 1 or {dim + count for count in dimensions} == {1}:
        return parts
    return opaque(f"after cat along dimension {dim}")


def add(operands: Sequence[Parts]) -> Parts:
    """Describe the elementwise sum of the operands."""
    terms = [parts[0] if len(parts) == 1 else Part(width(parts), "after cat") for parts in operands]
    widths = {term.channels for term in terms if term.channels is not None}
    if len(widths) > 1:
        return opaque("after add with broadcast channels", max(widths))
    channels = next(iter(widths), None)
    operators = tuple(name for term in terms for name in term.operators)
    # An operator's output that is added twice has another gradient than one occurrence, so its sum is opaque.
    if not operators or len(set(operators)) < len(operators):
        return opaque("after add", channels)
    complete = all(term.complete for term in terms)
    reason = " + ".join(operators if complete else (*operators, "rest"))
    dimensions = next((term.dimensions for term in terms if term.dimensions is not None), None)
    return (Part(channels, reason, operators, complete, final=True, dimensions=dimensions),)


class Recorder:
    """Follows the values through one forward of a model.

    A front end reports each call with a `Value` in the place of every tensor and gets the value of the result.

    Attributes:
        norm_inputs: What each norm has read, call by call.
        operator_calls: How often each linear operator was called.
        operator_uses: How often its output, or one of its parameters outside of it, was used.
        operator_origins: What it has read; see `Value`.
    """

    def __init__(self, model: nn.Module, operators: Collection[nn.Module] = ()) -> None:
        trusted = {id(module) for module in operators}
        self._names = {id(module): name for name, module in model.named_modules()}  # the first if it has two
        self._operators = {
            self.name(module): module
            for module in model.modules()
            if id(module) in trusted or (is_linear_operator(module) and vocabulary.is_leaf(module))
        }
        self._owners = {id(p): name for name, operator in self._operators.items() for p in operator.parameters()}
        self.norm_inputs: defaultdict[str, list[Parts]] = defaultdict(list)
        self.operator_calls: Counter[str] = Counter()
        self.operator_uses: Counter[str] = Counter()
        self.operator_origins: defaultdict[str, frozenset[str]] = defaultdict(frozenset)

    def name(self, module: nn.Module) -> str:
        """Return the qualified name of a module of the model."""
        return self._names[id(module)]

    def make_input(self, module: nn.Module) -> Value:
        """Return the value of an input of the model, or of a part of it that is run alone."""
        name = self.name(module)
        source = f"input of {name or 'the model'}"
        return Value(opaque(source, final=not name), frozenset({source}))

    def use(self, values: Iterable[Value]) -> None:
        """Record that something reads the values, or that they leave the model."""
        for value in values:
            self.operator_uses.update(name for part in value.parts for name in part.operators)

    def use_parameter(self, parameter: nn.Parameter) -> None:
        """Record that the model reads a parameter itself; if it is an operator's, that is a use of the operator."""
        if id(parameter) in self._owners:
            self.operator_uses[self._owners[id(parameter)]] += 1

    def call_module(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        """Record the call of a leaf module and return the value of its result."""
        kind, name = name_of(type(module)), self.name(module)
        operands = values_in((args, kwargs))
        origins = _joint_origins(operands)
        if vocabulary.is_norm(module):
            self.use(operands)
            self.norm_inputs[name].append(operands[0].parts if operands else opaque("not given as a tensor"))
            return Value(opaque(f"after {kind}", module.num_features, final=True), frozenset({name}))
        if name in self._operators:
            self.use(operands)
            self.operator_calls[name] += 1
            self.operator_origins[name] |= origins
            return Value((_operator_output(name, module),), frozenset({name}))
        if not vocabulary.is_torch_module(module):
            self.use(operands)
            return Value(opaque(f"after {kind}"), origins)
        # A module of torch's does what the function of that name does with the module's settings.
        settings = {key: getattr(module, key) for key in ("p", "training", "inplace") if hasattr(module, key)}
        return self.call_function(kind, args, {**kwargs, **settings})

    def call_function(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        """Record the call of a function or tensor method, named by `name_of`, and return the value of its result."""
        operands = values_in((args, kwargs))
        if not operands or name in vocabulary.METADATA:
            return Value(opaque(f"after {name}"))
        if vocabulary.returns_operand(name, kwargs):
            return operands[0]
        origins = _joint_origins(operands)
        if vocabulary.copies_operand(name, args):
            # Whoever reads the copy uses the operator whose output it is, so copying alone is no use.
            return Value(operands[0].parts, origins)
        self.use(operands)
        in_place = name.endswith("_") or name == "setitem" or kwargs.get("inplace") is True
        target = kwargs.get("out", operands[0] if in_place else None)
        parts = _sum_or_concatenation(name, args, kwargs)
        final = vocabulary.keeps_channels(name, args, kwargs)
        if isinstance(target, Value):
            target.overwrite(parts or changed_in_place(target.parts, name, final), origins)
            return target
        first = operands[0].parts
        if name == "getitem" and len(first) == 1 and not first[0].operators:
            # This is one of several results, or a slice: its width is not that of the whole.
            parts = opaque(first[0].reason)
        parts = parts or opaque(f"after {name}", width(first) if final else None, final)
        return Value(parts, origins, view_of=operands[0] if name in vocabulary.VIEWS else None)


def _operator_output(name: str, operator: nn.Module) -> Part:
    # Not weight.shape: reading a parametrized weight computes it, which may move the parametrization's state.
    if isinstance(operator, nn.Linear):
        return Part(operator.out_features, name, (name,), complete=True, final=True, dimensions=2)
    assert isinstance(operator, _ConvNd)
    dimensions = 2 + len(operator.kernel_size)
    return Part(operator.out_channels, name, (name,), complete=True, final=True, dimensions=dimensions)


def _joint_origins(values: Iterable[Value]) -> frozenset[str]:
    return frozenset().union(*(value.origins for value in values))


def _sum_or_concatenation(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Parts | None:
    """Describe the result of an addition or concatenation; None if the call is neither."""

    def argument(position: int, keyword: str, default: object = None) -> Any:
        return args[position] if position < len(args) else kwargs.get(keyword, default)

    if name in vocabulary.CONCATENATIONS:
        tensors, dim = argument(0, "tensors"), kwargs.get("axis", argument(1, "dim", 0))
        listed = isinstance(tensors, list | tuple) and all(isinstance(tensor, Value) for tensor in tensors)
        return concatenate([t.parts for t in tensors], dim) if listed and isinstance(dim, int) else None
    terms = [argument(0, "input"), argument(1, "other")]
    weighted = argument(2, "alpha", 1) != 1
    if name not in vocabulary.ADDITIONS or weighted or not all(isinstance(term, Value) for term in terms):
        return None
    return add([term.parts for term in terms])
