"""Which calls of linear operators made a tensor: read from its autograd graph.

In training `x.grad_fn` is the call that made x. A convolution's node has its input, its weight and its geometry; sums,
concatenations, views and copies lead on to others. The weight there is the effective one (padded, standardized,
parametrized, cast), whatever module made it, and its gradient reaches the parameters by autograd. Looking costs a few
microseconds and changes nothing; saved tensors that a hook has packed (activation checkpointing) are not unpacked.

    part   = the calls that are summed into a run of channels, and whether that is all there is to it
    layout = where the channels of a tensor are: IMAGE [N, C, ...], or ROWS [..., C], the positions in the same order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from crossbn.functional import Activation
from crossbn.pairing.calls import Call, Shape, convolution_call, linear_call


class Part(NamedTuple):
    """What feeds a run of channels."""

    channels: int
    calls: tuple[Call, ...]
    """Summed into it; none if it has no linear operator."""
    complete: bool
    """Whether the channels are nothing but that sum."""
    reason: str
    """One phrase for people."""
    activation: Activation | None = None
    """What has been applied to it since."""

    @property
    def direct(self) -> bool:
        """Whether the channels are the output of one call."""
        return self.complete and len(self.calls) == 1 and self.activation is None


class _Layout(Enum):
    IMAGE = "channels are dimension 1"
    ROWS = "channels are the last dimension"


class _Place(NamedTuple):
    """A tensor on the way back to the operators."""

    node: Any
    """What made it; None if it has no graph."""
    slot: int
    """As which of the node's results."""
    shape: Shape
    """() without a graph."""
    layout: _Layout
    x: Tensor
    """The norm's input."""
    through: bool
    """Whether to look through an activation."""
    read: dict[Any, Part]
    """What other norms of the forward have read, by node."""

    @property
    def channel_dim(self) -> int:
        return 1 if self.layout is _Layout.IMAGE else len(self.shape) - 1

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    def opaque(self, reason: str) -> list[Part]:
        return [Part(self.channels, (), False, reason)]

    def operand(self, index: int = 0) -> _Place:
        """Return the place of an operand of what made this one, its channels being where they are here."""
        node, slot = self.node.next_functions[index]
        if node is None:
            return self._replace(node=None, slot=0, shape=())
        variable = getattr(node, "variable", None)
        shape = node._input_metadata[slot].shape if variable is None else variable.shape
        return self._replace(node=node, slot=slot, shape=tuple(shape))


def read_calls(x: Tensor, through: bool = False, read: dict[Any, Part] | None = None) -> tuple[Part, ...]:
    """Return what made `x` [N, C, ...], channel run by channel run, and if asked to `through` an activation.

    In `read` it is noted which convolutions were read for a concatenation: the next one has most of them as well.

    Example:
        >>> conv, x = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 6, 6)
        >>> [(part.channels, part.reason) for part in read_calls(torch.cat([conv(x), conv(x).relu()], 1))]
        [(8, 'convolution'), (8, 'after relu')]
    """
    if x.grad_fn is None:
        return (Part(x.shape[1], (), False, "its input has no graph"),)
    known = {} if read is None else read
    return tuple(_follow(_Place(x.grad_fn, x.output_nr, tuple(x.shape), _Layout.IMAGE, x, through, known)))


def _follow(place: _Place) -> list[Part]:
    while True:
        name = type(place.node).__name__
        if (call := _call(name, place)) is not None:
            return [Part(place.channels, (call,), call.is_whole, call.kind)]
        if name == "AddBackward0":
            return _sum(place)
        if name == "CatBackward0":
            return _concatenation(place)
        if place.through and (activation := Activation.of_node(place.node)) is not None:
            return _activated(place, activation)
        behind = _behind(name, place)
        if behind is None:
            return place.opaque("a parameter" if name.endswith("AccumulateGrad") else f"after {_readable(name)}")
        place = behind


def _activated(place: _Place, activation: Activation) -> list[Part]:
    operand = place.operand()
    if operand.shape == place.shape:
        found = _follow(operand._replace(through=False))
        if len(found) == 1 and found[0].direct:
            return [found[0]._replace(reason=f"{found[0].reason}, through {activation.name}", activation=activation)]
    return place.opaque(f"after {activation.name}")


def _call(name: str, place: _Place) -> Call | None:
    if name == "ConvolutionBackward0" and place.layout is _Layout.IMAGE:
        return convolution_call(place.node, place.shape)
    if name in ("AddmmBackward0", "MmBackward0") and len(place.shape) == 2:
        return linear_call(place.node, place.shape, tuple(place.x.shape))
    return None


_VIEWS = {
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "UnsqueezeBackward0",
}
_COPIES = {"CloneBackward0", "ToCopyBackward0", "AliasBackward0"}
_FUNCTIONS_OF_SEVERAL = {"BackwardHookFunctionBackward", "RegisterPostBackwardFunctionBackward"}
"""Of full backward hooks and of FSDP: they return what they are given, each result its own argument."""


def _behind(name: str, place: _Place) -> _Place | None:
    """Return the operand of a node that only looks at it differently; None if the node does something else."""
    if name in _COPIES or name in _FUNCTIONS_OF_SEVERAL:
        operand = place.operand(place.slot if name in _FUNCTIONS_OF_SEVERAL else 0)
        return operand if operand.shape == place.shape else None
    if name in _VIEWS:
        operand = place.operand()
        layout = _layout_of_viewed(place, operand.shape)
        return None if layout is None else operand._replace(layout=layout)
    if name in ("PermuteBackward0", "TransposeBackward0"):
        operand = place.operand()
        rank = len(operand.shape)
        channels_to_second = (0, rank - 1, *range(1, rank - 1))
        if place.layout is _Layout.IMAGE and rank > 2 and _permutation(place.node, name, rank) == channels_to_second:
            return operand._replace(layout=_Layout.ROWS)
    return None


def _layout_of_viewed(place: _Place, shape: Shape) -> _Layout | None:
    """Return where the channels are in a tensor of which the place is a view with the same order of elements."""
    if place.layout is _Layout.IMAGE and shape[:2] == place.shape[:2]:
        return _Layout.IMAGE
    last_is_channels = place.layout is _Layout.ROWS or len(place.shape) == 2
    return _Layout.ROWS if last_is_channels and shape[-1:] == (place.channels,) else None


def _permutation(node: Any, name: str, rank: int) -> tuple[int, ...]:
    if name == "PermuteBackward0":
        return tuple(dim % rank for dim in _signed(node._saved_dims))
    order = list(range(rank))
    a, b = (dim % rank for dim in _signed((node._saved_dim0, node._saved_dim1)))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _signed(dims: Sequence[int]) -> Iterator[int]:
    return (dim - 2**64 if dim >= 2**63 else dim for dim in dims)  # torch shows them unsigned


def _sum(place: _Place) -> list[Part]:
    if place.node._saved_alpha != 1:
        return place.opaque("after a weighted add")
    calls: list[Call] = []
    biases: list[Tensor] = []
    complete = True
    for term in (place.operand(0), place.operand(1)):
        bias = getattr(term.node, "variable", None)
        if bias is not None and place.layout is _Layout.ROWS and term.shape == (place.channels,):
            biases.append(bias)
        elif term.node is None:
            complete = False
        elif term.shape != place.shape:
            # It may be learned, and moves the mean then: unlike data of the same shape it is no part of the statistics.
            return place.opaque("after add of something that is broadcast")
        else:
            parts = _follow(term._replace(through=False))
            if len(parts) == 1:
                calls += parts[0].calls
            complete = complete and len(parts) == 1 and parts[0].complete
    if biases and len(calls) == 1 and calls[0].bias is None:
        calls[0].bias = biases[0]
    elif biases:
        complete = False
    nodes = [call.node for call in calls]
    if any(nodes.count(node) > 1 for node in nodes):  # x + x has another gradient than one occurrence
        return place.opaque("after add of an operator's output to itself")
    if not calls:
        return place.opaque("after add")
    said = " + ".join([*(call.kind for call in calls), *([] if complete else ["rest"])])
    return [Part(place.channels, tuple(calls), complete, said)]


def _concatenation(place: _Place) -> list[Part]:
    (dim,) = _signed((place.node._saved_dim,))
    if (dim := dim % len(place.shape)) != place.channel_dim:
        return place.opaque(f"after cat along dimension {dim}")
    parts: list[Part] = []
    missing = []
    for i, (node, _) in enumerate(place.node.next_functions):
        if place.layout is _Layout.IMAGE and node in place.read:
            parts.append(place.read[node])
        elif node is None:
            missing.append(len(parts))
        else:
            found = _follow(place.operand(i))
            if type(node).__name__ == "ConvolutionBackward0" and found[0].calls and found[0].calls[0].is_seen:
                place.read[node] = found[0]
            parts += found
    if len(missing) > 1:
        return place.opaque("after cat of several tensors without a graph")
    for index in missing:
        rest = place.channels - sum(part.channels for part in parts)
        parts.insert(index, Part(rest, (), False, "without a graph"))
    return parts


def _readable(name: str) -> str:
    """Return what people call a node: ReluBackward0 is relu."""
    bare = name.partition("Backward")[0].rpartition(":")[2].lstrip("_") or name
    return "".join(
        f"_{c.lower()}" if c.isupper() and i and not bare[i - 1].isupper() else c.lower() for i, c in enumerate(bare)
    )
