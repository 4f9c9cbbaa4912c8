"""What torch's functions and modules do, as far as pairing needs to know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn.functional import LINEAR_OPERATORS

# fmt: off
VIEWS = {
    "as_strided", "bfloat16", "chunk", "cpu", "cuda", "data", "detach", "diagonal", "double", "expand",
    "expand_as", "flatten", "float", "getitem", "half", "mT", "movedim", "narrow", "permute", "ravel",
    "reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "swapdims", "T", "t", "tensor_split",
    "to", "transpose", "type", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
}
"""The result may be the operand's memory in another shape or type: a write to it may change the operand."""

METADATA = {
    "device", "dim", "dtype", "get_device", "is_complex", "is_contiguous", "is_cuda", "is_floating_point",
    "layout", "len", "ndim", "ndimension", "nelement", "numel", "requires_grad", "shape", "size", "stride",
}
"""The call touches no element, so it does not count as a use of the operand."""

_CHANNELWISE = {
    "celu", "clamp", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "interpolate",
    "leaky_relu", "log_sigmoid", "log_softmax", "logsigmoid", "mish", "prelu", "relu", "relu6", "rrelu", "selu",
    "sigmoid", "silu", "softmax", "softmax2d", "softmin", "softplus", "softshrink", "softsign", "tanh",
    "tanhshrink", "threshold", "upsample", "upsampling_bilinear2d", "upsampling_nearest2d",
}

_SYNONYMS = {
    "radd": "add", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_",
    "concat": "cat", "concatenate": "cat",
}
# fmt: on
_DROPOUT = re.compile(r"(feature_)?(alpha_)?dropout[123]?d?")
_POOLING_OR_PADDING = re.compile(r".*(pool|_pad)[123]d")


def name_of(called: str | type[nn.Module] | Callable[..., Any]) -> str:
    """Return the name under which this file knows a tensor method, a module's type or a function.

    A module's type is spelled like torch's functions, and a Python operator like the tensor method that does its work.
    A function from outside torch gets a name of two words, which means nothing here, whatever the function is called.
    """
    if isinstance(called, type) and issubclass(called, nn.Module):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", called.__name__).lower()
    name = called if isinstance(called, str) else str(getattr(called, "__name__", called))
    if name == "__get__":  # This is a property of tensors, such as shape.
        return str(getattr(getattr(called, "__self__", None), "__name__", name))
    package = (getattr(called, "__module__", None) or "torch").partition(".")[0]
    if not isinstance(called, str) and package not in {"torch", "_operator", "builtins"}:
        return f"function {name}"
    bare = name.strip("_") if name.startswith("__") else name
    return _SYNONYMS.get(bare, bare)


def returns_operand(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call returns its first operand as it is."""
    if _DROPOUT.fullmatch(name):
        return kwargs.get("p") == 0 or kwargs.get("training") is False
    return name in {"contiguous", "identity"}


def copies_operand(name: str, args: Sequence[Any]) -> bool:
    """Tell whether a call returns a new tensor with the elements of its first operand."""
    # Python's sum() begins with the number zero.
    return name == "clone" or (name == "add" and any(type(arg) in (int, float) and arg == 0 for arg in args))


def keeps_channels(name: str) -> bool:
    """Tell whether a call is an activation, a pooling or the like: no operator's output, and as wide as its operand."""
    return name in _CHANNELWISE or bool(_DROPOUT.fullmatch(name) or _POOLING_OR_PADDING.fullmatch(name))


def is_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Tell whether the module is one of the batch norms to be paired."""
    return isinstance(module, _BatchNorm)


def holds_norm(module: nn.Module) -> bool:
    """Tell whether the module is a batch norm or has one inside."""
    return any(is_norm(inner) for inner in module.modules())


def is_torch_module(module: nn.Module) -> bool:
    """Tell whether the module's type is torch's own, so that its name says what it does."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a call of the module counts as one step, whatever is called inside."""
    if is_norm(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    built_in = is_torch_module(module) and not isinstance(module, nn.Sequential)
    return (built_in or isinstance(module, LINEAR_OPERATORS)) and not holds_norm(module)
