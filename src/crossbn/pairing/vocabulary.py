"""What torch's functions and modules do, as far as pairing needs to know."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import modules

from crossbn.functional import LINEAR_OPERATORS
from crossbn.torch_internals import BatchNormBase

# fmt: off
METADATA = {
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
    """Return the name under which this file knows a tensor method, a module's type or a function.

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
_KEEPING = _OTHERS | {name_of(kind) for family in _FAMILIES for kind in vars(family).values() if isinstance(kind, type)}


def keeps_channels(name: str) -> bool:
    """Tell whether a call is an activation, a pooling or the like: no operator's output, and as wide as its operand."""
    return name in _KEEPING - {"glu", "multihead_attention"}


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
