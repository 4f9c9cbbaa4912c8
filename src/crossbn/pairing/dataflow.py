"""What every tensor of a forward is made of, followed from call to call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, fx, nn

from crossbn.functional import is_linear_operator
from crossbn.pairing import vocabulary

LeafT = TypeVar("LeafT")


@dataclass(frozen=True)
class Part:
    """A run of channels: a sum of linear operators' outputs and perhaps of something else, or something opaque."""

    channels: int | None  # None where the width is unknown
    reason: str  # one phrase for people
    operators: tuple[str, ...] = ()  # qualified names of what is summed into the run; none if it is opaque
    complete: bool = False  # whether it is nothing but the sum of these operators' outputs
    final: bool = False  # whether a closer look would find no other operator
    dimensions: int | None = None  # of the tensor, batch and channels included, where an operator tells

    @property
    def direct(self) -> bool:
        """Whether the run is one operator's output as it is."""
        return self.complete and len(self.operators) == 1


Parts: TypeAlias = tuple[Part, ...]
"""What a tensor is made of: one part, or several side by side along the channels."""


@dataclass(eq=False)
class Value:
    """One tensor of a forward. Its origins are the norms and operators that it is computed from, by name.

    What lies before another norm or operator is no origin; what comes from outside is one as "input of ...".
    """

    parts: Parts  # what it is made of now: a write in place changes it
    origins: frozenset[str] = frozenset()
    view_of: Value | None = None  # the value whose memory it may share

    def overwrite(self, parts: Parts, origins: frozenset[str]) -> None:
        """Take note of a write in place, which changes what this value is a view of as well."""
        self.parts, self.origins = parts, origins
        if (base := self.view_of) is not None:
            base.overwrite(changed_in_place(base.parts, "a write to a view of it"), base.origins | origins)


def leaves(nest: Any, kind: type[LeafT]) -> list[LeafT]:
    """Return the leaves of a kind in a nest of lists, tuples, dicts and slices, in order."""
    found: list[Any] = []
    fx.node.map_aggregate(nest, found.append)
    return [leaf for leaf in found if isinstance(leaf, kind)]


def opaque(reason: str, channels: int | None = None, final: bool = False) -> Parts:
    """Describe a tensor that is no operator's output."""
    return (Part(channels, reason, final=final),)


def changed_in_place(parts: Parts, by: str, final: bool = False) -> Parts:
    """Describe a tensor after a write to it."""
    return opaque(f"changed in place by {by.rstrip('_')}", width(parts), final)


def width(parts: Parts) -> int | None:
    """Return the number of channels, None if it is unknown for any part."""
    known = [part.channels for part in parts if part.channels is not None]
    return sum(known) if len(known) == len(parts) else None


def concatenate(tensors: Any, dim: Any = 0, **options: Any) -> Parts:
    """Describe the result of ``torch.cat`` with these arguments."""
    dim = options.get("axis", dim)
    listed = isinstance(tensors, list | tuple) and all(isinstance(each, Value) for each in tensors)
    if not listed or not isinstance(dim, int):
        return opaque("after cat")
    parts = tuple(part for tensor in tensors for part in tensor.parts)
    dimensions = {part.dimensions for part in parts if part.dimensions is not None}
    # A negative dimension counts from the end, and only the operators tell how many dimensions there are.
    along_channels = dim == 1 or {dim + count for count in dimensions} == {1}
    return parts if along_channels else opaque(f"after cat along dimension {dim}")


def add(input: Any, other: Any, alpha: Any = 1, **_: Any) -> Parts | None:  # noqa: A002  # torch's name
    """Describe the result of ``torch.add`` with these arguments; None if it is no plain sum of tensors."""
    if not isinstance(input, Value) or not isinstance(other, Value) or alpha != 1:
        return None
    terms = [v.parts[0] if len(v.parts) == 1 else Part(width(v.parts), "after cat") for v in (input, other)]
    widths = {term.channels for term in terms if term.channels is not None}
    if len(widths) > 1:
        return opaque("after add with broadcast channels", max(widths))
    channels = next(iter(widths), None)
    operators = tuple(name for term in terms for name in term.operators)
    # An operator's output that is added twice has another gradient than one occurrence, so the sum is opaque.
    if not operators or len(set(operators)) < len(operators):
        return opaque("after add", channels)
    complete = all(term.complete for term in terms)
    reason = " + ".join(operators if complete else (*operators, "rest"))
    dimensions = next(term.dimensions for term in terms if term.dimensions is not None)
    return (Part(channels, reason, operators, complete, final=True, dimensions=dimensions),)


_COMBINATIONS: dict[str, Callable[..., Parts | None]] = {"add": add, "add_": add, "cat": concatenate}


class Recorder:
    """Follows the values through one forward of a model.

    A front end reports each call with a `Value` in the place of every tensor and gets the value of the result.
    """

    def __init__(self, model: nn.Module, operators: Collection[nn.Module] = ()) -> None:
        trusted = {id(module) for module in operators}
        self._names = {id(module): name for name, module in model.named_modules()}  # the first if it has two
        self._operators = {
            name: module
            for name, module in model.named_modules()
            if id(module) in trusted or (is_linear_operator(module) and vocabulary.is_leaf(module))
        }
        self._owners = {id(p): name for name, operator in self._operators.items() for p in operator.parameters()}
        # What each norm has read, call by call; and of each operator how often it was called, how often its output, or
        # one of its parameters outside of it, was used, and what it has read.
        self.norm_inputs: defaultdict[str, list[Parts]] = defaultdict(list)
        self.operator_calls: Counter[str] = Counter()
        self.operator_uses: Counter[str] = Counter()
        self.operator_origins: defaultdict[str, frozenset[str]] = defaultdict(frozenset)

    def make_input(self, module: nn.Module) -> Value:
        """Return the value of an input of the model, or of a part of it that is run alone."""
        name = self._names[id(module)]
        source = f"input of {name or 'the model'}"
        return Value(opaque(source, final=not name), frozenset({source}))

    def use(self, used: Iterable[Value | Tensor]) -> None:
        """Record that values, or parameters outside of their operators, are read or leave the model."""
        for each in used:
            if isinstance(each, Value):
                self.operator_uses.update(name for part in each.parts for name in part.operators)
            elif id(each) in self._owners:
                self.operator_uses[self._owners[id(each)]] += 1

    def call_module(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        """Record the call of a leaf module and return the value of its result."""
        name, kind = self._names[id(module)], vocabulary.name_of(type(module))
        if vocabulary.is_torch_module(module) and not vocabulary.is_norm(module) and name not in self._operators:
            # It does what the function of that name does with the module's settings.
            settings = {key: getattr(module, key) for key in ("p", "training", "inplace") if hasattr(module, key)}
            return self.call_function(kind, args, {**kwargs, **settings})
        operands = leaves((args, kwargs), Value)
        self.use(operands)
        if vocabulary.is_norm(module):
            self.norm_inputs[name].append(operands[0].parts if operands else opaque("not given as a tensor"))
            return Value(opaque(f"after {kind}", module.num_features, final=True), frozenset({name}))
        if name in self._operators:
            self.operator_calls[name] += 1
            self.operator_origins[name] |= _joint_origins(operands)
            return Value((_output_of(module, name),), frozenset({name}))
        return Value(opaque(f"after {kind}"), _joint_origins(operands))

    def call_function(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        """Record the call of a function or tensor method, by its `name_of`, and return the value of its result."""
        operands = leaves((args, kwargs), Value)
        if not operands or name in vocabulary.METADATA:
            return Value(opaque(f"after {name}"))
        if vocabulary.returns_operand(name, kwargs):
            return operands[0]
        first, origins = operands[0].parts, _joint_origins(operands)
        if vocabulary.copies_operand(name, args):
            return Value(first, origins)  # Copying is no use; to read the copy is one.
        self.use(operands)
        parts = _COMBINATIONS[name](*args, **kwargs) if name in _COMBINATIONS else None
        final = vocabulary.keeps_channels(name)
        in_place = name.endswith("_") or name == "setitem" or kwargs.get("inplace") is True
        target = kwargs.get("out", operands[0] if in_place else None)
        if isinstance(target, Value):
            target.overwrite(parts or changed_in_place(target.parts, name, final), origins)
            return target
        if name == "getitem" and len(first) == 1 and not first[0].operators:
            # This is one of several results, or a slice: its width is not that of the whole.
            parts = opaque(first[0].reason)
        parts = parts or opaque(f"after {name}", width(first) if final else None, final)
        return Value(parts, origins, view_of=operands[0] if name in vocabulary.VIEWS else None)


def _output_of(operator: Any, name: str) -> Part:
    # Not by weight.shape: reading a parametrized weight computes it, which may move the parametrization's state.
    channels = operator.out_features if isinstance(operator, nn.Linear) else operator.out_channels
    dimensions = 2 if isinstance(operator, nn.Linear) else 2 + len(operator.kernel_size)
    return Part(channels, name, (name,), complete=True, final=True, dimensions=dimensions)


def _joint_origins(values: Iterable[Value]) -> frozenset[str]:
    return frozenset().union(*(value.origins for value in values))
