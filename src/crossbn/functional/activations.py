r"""Elementwise activations between an operator and a norm, and how the moments change with the weights before them.

A table says what an activation makes of an input, and with which slope: one line for each kind of node that autograd
has, with the numbers that the node keeps of the call. A slope is a kernel of torch's own backward, applied to 1.

With `z = W * y + b`, `x = act(z)`, `patch` the inputs that one output position reads and `slope = act'(z)`:

| here | formula | shape |
|---|---|---|
| `mean_grad` | E[slope patch], another one for every channel | [C, I] |
| `var_grad` | 2 E[(x - mean) slope patch] | [C, I] |

The averages are over the sampled positions. The outputs there are made once more from patches and weights: nothing has
to be kept for it, and an activation that works in place makes no difference. A bias does not just shift the mean here:
it is one more weight, whose input is 1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from struct import pack, unpack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn.functional.geometry import Geometry
from crossbn.functional.moments import Flag
from crossbn.functional.sensitivity import outputs_at, patches_at, sample_places
from crossbn.functional.settings import Settings
from crossbn.functional.storage import GradientStorage, Observation, agree, choose_plan
from crossbn.functional.taylor import project, spread

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
        options = [
            _WORDS.index(each) if isinstance(each, str) else unpack("q", pack("d", each))[0] for each in self.options
        ]
        return [list(_KINDS).index(self.kind), *options]

    @classmethod
    def from_numbers(cls, numbers: Iterator[int]) -> Activation:
        """Take what `numbers` returned off the front."""
        kind = list(_KINDS)[next(numbers)]
        options = [next(numbers) for _ in _KINDS[kind].options]
        words = kind == "Gelu"
        return cls(kind, tuple(_WORDS[each] if words else unpack("d", pack("q", each))[0] for each in options))

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


@functools.lru_cache(4096)
def geometry_of_rows(geometry: Geometry, has_bias: bool) -> Geometry:
    """Return the shape of an operator that has the same weights, and the bias, as one row for each channel."""
    channels = geometry.out_channels
    return Geometry(channels, channels * (geometry.patch_size + has_bias), channels)


class ActivatedStorage(GradientStorage):
    """Keeps the gradients of mean and variance of one operator that an activation follows, both of the weight's size.

    All channels have a mean gradient of their own, as if each were a group.
    """

    def __init__(self, geometry: Geometry, has_bias: bool, activation: Activation, settings: Settings) -> None:
        plan = choose_plan(geometry, settings.positions, settings.window - 1)
        super().__init__([geometry_of_rows(geometry, has_bias)], plan.positions, settings)
        self.activation = activation

    def remember(self, seen: Observation) -> tuple[dict[str, Tensor], Flag]:
        """Return what to keep of today, and whether the output is what activation and weights make of the inputs."""
        x, ((geometry, _, y, sizes, _),), (weight,) = seen.x, seen.operands, seen.weights
        assert y is not None
        places = sample_places(len(x), x.shape[2:].numel(), self.positions, seen.phase, x.device)
        patches, output = patches_at(y, geometry, places, sizes), outputs_at(x, places)
        if patches.shape[2] < weight.shape[1]:
            patches = F.pad(patches, (0, 1), value=1.0)  # what the bias reads
        z, centred = project(patches, weight), output - seen.mean
        slope = self.activation.slope(z) * ((1 if seen.local is None else seen.local) / len(z))
        grads = {"0.mean_grad": spread(slope, patches), "0.var_grad": spread(2 * centred * slope, patches)}
        is_theirs = not seen.is_whole or agree(
            self.activation(z) - output, seen.var + centred.square(), lambda: project(patches.abs(), weight.abs()), x
        )
        return self._with_products(grads, seen.weights), is_theirs
