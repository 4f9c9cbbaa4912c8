"""What calls of torch's functions and tensor methods mean to pairing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossbn.pairing.description import Description, Opaque, add, concatenate, width
from crossbn.pairing.value import Value, values_in

_CONCATENATIONS = {"cat", "concat", "concatenate"}
_ADDITIONS = {"add", "add_"}

_ALIASES = {"contiguous"}
"""Same elements, possibly the same memory."""

# fmt: off
_VIEWS = {
    "as_strided", "bfloat16", "chunk", "cpu", "cuda", "data", "detach", "diagonal", "double", "expand",
    "expand_as", "flatten", "float", "getitem", "half", "mT", "movedim", "narrow", "permute", "ravel",
    "reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "swapdims", "T", "t", "tensor_split",
    "to", "transpose", "type", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
}
"""Another shape or type on what may be the same memory: writing to the result may write to the operand."""

_METADATA = {
    "device", "dim", "dtype", "get_device", "is_complex", "is_contiguous", "is_cuda", "is_floating_point",
    "layout", "len", "ndim", "ndimension", "nelement", "numel", "requires_grad", "shape", "size", "stride",
}
"""Reads that touch no element: they do not make the caller a reader of the value."""

_CHANNELWISE = {
    "celu", "clamp", "dropout", "dropout1d", "dropout2d", "dropout3d", "elu", "gelu", "hardsigmoid",
    "hardswish", "hardtanh", "interpolate", "leaky_relu", "logsigmoid", "mish", "prelu", "relu", "relu6",
    "rrelu", "selu", "sigmoid", "silu", "softplus", "tanh", "upsample",
}
"""Functions that keep the number of channels, besides pooling and spatial padding."""
# fmt: on

_CANONICAL = {"radd": "add", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_"}
"""Python's operators under the name of the tensor method that does the work."""


def function_name(function: Callable[..., Any]) -> str:
    """The name that gives a function its meaning here.

    Functions from outside torch get a name of two words: whatever they are called, they mean nothing to us.
    """
    name = str(getattr(function, "__name__", function))
    if name == "__get__":  # a property of tensors, such as shape
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    package = (getattr(function, "__module__", None) or "torch").partition(".")[0]
    if package not in {"torch", "_operator", "builtins"}:
        return f"function {name}"
    return method_name(name)


def method_name(name: str) -> str:
    """The same for a tensor method or Python operator given by name."""
    bare = name.strip("_") if name.startswith("__") else name
    return _CANONICAL.get(bare, bare)


@dataclass(frozen=True)
class Call:
    """One call of a function, with a `Value` in the place of every tensor."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def operands(self) -> list[Value]:
        """The values among the arguments, in order."""
        return [*values_in(self.args), *values_in(dict(self.kwargs))]

    def argument(self, position: int, keyword: str, default: object = None) -> Any:
        """An argument given by position or by keyword."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(keyword, default)

    @property
    def reads_no_element(self) -> bool:
        """Whether the call asks for shape, type or the like only."""
        return self.name in _METADATA

    @property
    def aliases(self) -> bool:
        """Whether the result is the first operand itself, or as good as."""
        if re.fullmatch(r"(feature_)?(alpha_)?dropout[123]?d?", self.name):
            return self.kwargs.get("p") == 0 or self.kwargs.get("training") is False
        return self.name in _ALIASES

    @property
    def copies(self) -> bool:
        """Whether the result is a tensor of its own with the first operand's elements."""
        # Adding the number zero is how Python's sum() begins.
        adds_nothing = self.name == "add" and any(type(arg) in (int, float) and arg == 0 for arg in self.args)
        return self.name == "clone" or adds_nothing

    @property
    def views(self) -> bool:
        """Whether the result may share the first operand's memory."""
        return self.name in _VIEWS

    @property
    def overwritten(self) -> Value | None:
        """The operand that the call changes in place, if it does."""
        out = self.kwargs.get("out")
        if isinstance(out, Value):
            return out
        in_place = self.name.endswith("_") or self.name == "setitem" or self.kwargs.get("inplace") is True
        return self.operands[0] if in_place and self.operands else None


def describe_result(call: Call) -> Description:
    """The description of what a call returns."""
    first = call.operands[0].description
    if call.name in _CONCATENATIONS:
        return _describe_concatenation(call)
    if call.name in _ADDITIONS:
        terms = [call.argument(0, "input"), call.argument(1, "other")]
        if all(isinstance(term, Value) for term in terms) and call.argument(2, "alpha", 1) == 1:
            return add([term.description for term in terms])
    if call.overwritten is not None:
        return changed_in_place(call.overwritten.description, call.name, _keeps_channels(call))
    if call.name == "getitem" and isinstance(first, Opaque):
        return Opaque(first.reason)  # one of several results, or a slice: the width is not the whole's
    final = _keeps_channels(call)
    return Opaque(f"after {call.name}", width(first) if final else None, final)


def changed_in_place(description: Description, by: str, final: bool = False) -> Opaque:
    """What is left of a description when its tensor is written to."""
    return Opaque(f"changed in place by {by.rstrip('_')}", width(description), final)


def _describe_concatenation(call: Call) -> Description:
    tensors = call.argument(0, "tensors")
    dim = call.kwargs.get("axis", call.argument(1, "dim", 0))
    listed = isinstance(tensors, list | tuple) and all(isinstance(tensor, Value) for tensor in tensors)
    if not listed or not isinstance(dim, int):
        return Opaque("after cat")
    return concatenate([tensor.description for tensor in tensors], dim)


def _keeps_channels(call: Call) -> bool:
    if call.name == "pad":
        # Two numbers per padded dimension, the last dimension first: up to four stay within an image.
        padding = call.argument(1, "pad")
        return isinstance(padding, list | tuple) and len(padding) <= 4
    return call.name in _CHANNELWISE or re.search(r"_pool[123]d$", call.name) is not None
