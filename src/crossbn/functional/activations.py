"""Elementwise activations by the node that autograd has of them: what they make of an input, and with which slope.

A table is all there is: one line for each kind of node, with the numbers that the node keeps of the call. A slope is a
kernel of torch's own backward, applied to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from struct import pack as _pack
from struct import unpack as _unpack
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_aten = torch.ops.aten


class _Kind(NamedTuple):
    function: Callable[..., Tensor]
    """Of the input and the options."""
    slope: Callable[..., Tensor]
    """Of ones, the input and the options."""
    options: tuple[str, ...] = ()
    """Numbers and words that the node keeps of the call."""


# fmt: off
_KINDS = {
    "Celu": _Kind(torch.celu, lambda one, z, a: _aten.elu_backward(one, a, 1.0, 1 / a, False, z), ("alpha",)),
    "Elu": _Kind(_aten.elu, lambda one, z, *options: _aten.elu_backward(one, *options, False, z),
                 ("alpha", "scale", "input_scale")),
    "Gelu": _Kind(lambda z, how: _aten.gelu(z, approximate=how),
                  lambda one, z, how: _aten.gelu_backward(one, z, approximate=how), ("approximate",)),
    "Hardsigmoid": _Kind(_aten.hardsigmoid, _aten.hardsigmoid_backward),
    "Hardswish": _Kind(_aten.hardswish, _aten.hardswish_backward),
    "Hardtanh": _Kind(_aten.hardtanh, _aten.hardtanh_backward, ("min_val", "max_val")),
    "LeakyRelu": _Kind(_aten.leaky_relu, lambda one, z, a: _aten.leaky_relu_backward(one, z, a, False),
                       ("negative_slope",)),
    "Mish": _Kind(_aten.mish, _aten.mish_backward),
    "Relu": _Kind(_aten.relu, lambda one, z: _aten.threshold_backward(one, z, 0)),
    "Sigmoid": _Kind(_aten.sigmoid, lambda one, z: _aten.sigmoid_backward(one, z.sigmoid())),
    "Silu": _Kind(_aten.silu, _aten.silu_backward),
    "Softplus": _Kind(_aten.softplus, _aten.softplus_backward, ("beta", "threshold")),
    "Tanh": _Kind(_aten.tanh, lambda one, z: _aten.tanh_backward(one, z.tanh())),
}
# fmt: on


_WORDS = ("none", "tanh")


def _bits(number: float) -> int:
    return int(_unpack("q", _pack("d", number))[0])


class Activation(NamedTuple):
    """A function that is applied to each element of an operator's output."""

    kind: str
    options: tuple[float | str, ...] = ()

    @classmethod
    def of_node(cls, node: Any) -> Activation | None:
        """Return the activation that a node of the graph stands for, None for any other node.

        Example:
            >>> x = torch.zeros(1, requires_grad=True)
            >>> Activation.of_node(torch.nn.functional.leaky_relu(x).grad_fn)
            Activation(kind='LeakyRelu', options=(0.01,))
        """
        name = type(node).__name__.partition("Backward")[0]
        if name not in _KINDS:
            return None
        return cls(name, tuple(getattr(node, f"_saved_{option}") for option in _KINDS[name].options))

    def numbers(self) -> list[int]:
        """Return the activation as integers, for what can hold nothing else."""
        options = [_WORDS.index(each) if isinstance(each, str) else _bits(float(each)) for each in self.options]
        return [list(_KINDS).index(self.kind), *options]

    @classmethod
    def from_numbers(cls, numbers: Iterator[int]) -> Activation:
        """Take what `numbers` returned off the front."""
        kind = list(_KINDS)[next(numbers)]
        options = [next(numbers) for _ in _KINDS[kind].options]
        words = kind == "Gelu"
        return cls(kind, tuple(_WORDS[each] if words else _unpack("d", _pack("q", each))[0] for each in options))

    @property
    def name(self) -> str:
        """What people call it."""
        return _CAMEL.sub("_", self.kind).lower()

    def __call__(self, z: Tensor) -> Tensor:
        """Return act(z)."""
        return _KINDS[self.kind].function(z, *self.options)

    def slope(self, z: Tensor) -> Tensor:
        """Return act'(z)."""
        return _KINDS[self.kind].slope(torch.ones_like(z), z, *self.options)
