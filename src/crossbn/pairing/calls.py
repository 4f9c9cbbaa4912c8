"""One call of a linear operator at one training step: what it read, with which weight, and its place in the graph."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.functional import Geometry
from crossbn.ops.autograd import WeightGradientHook
from crossbn.torch_internals import has_hooks, is_freed

Shape = tuple[int, ...]
_KEY = "crossbn"
_LARGE_WEIGHT = 2**15  # below, adding two gradients costs less than a hook


class Call:
    """A call of a convolution, a transposed convolution or a linear layer; it lives as long as a norm looks at it.

    Attributes:
        output_sizes: spatial extent of the output.
        parameter: the Parameter that the weight is, or is a cast of; None if it is computed from others.
        node: of the autograd graph; None if a forward hook has seen the call.
        kind: what people call it.
        geometry: of the operator, if input and weight are seen.
        weight: the effective one; None if it cannot be seen.
        bias: the Parameter that the bias is; None if there is none, or it is hidden.
        trained: weight and bias as gradients find them, where those above are copies of values that are gone (FSDP).
        is_guessed: whether the weight is what its Parameter is, as far as the graph tells: a node does not keep it.
        is_freed: whether the weight's memory has been given back.
        bias_is_hidden: whether the bias is computed from others: the graph does not have its value.
        is_whole: whether the operator's output is the weight's and the visible bias's doing alone.
    """

    geometry: Geometry

    def __init__(
        self, output_sizes: Shape, parameter: Tensor | None, node: Any = None, kind: str = "", weight_slot: int = 1
    ) -> None:
        self.output_sizes = torch.Size(output_sizes)
        self.parameter = parameter
        self.node, self.kind, self._weight_slot = node, kind, weight_slot
        self._y: Tensor | None = None
        self._node_has_input = False
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.trained: tuple[Tensor | None, Tensor | None] | None = None
        self.is_guessed = self.is_freed = self.bias_is_hidden = False
        self.is_whole = True
        self._shared: dict[Any, Any] = {}

    def see(self, geometry: Geometry, y: Tensor | None, weight: Tensor, bias: Tensor | None) -> Call:
        """Let input and weight be known; the input is left to the node of a convolution, which may let go of it."""
        self.geometry, self._y, self.weight, self.bias = geometry, y, weight, bias
        self._node_has_input = y is None
        return self

    def take_from(self, other: Call) -> None:
        """Know what another one knows, which a hook has seen."""
        self.geometry, self._y, self.weight, self.bias = other.geometry, other.y, other.weight, other.bias
        self.trained = other.trained

    @property
    def y(self) -> Tensor | None:
        """The input without its graph, [N, C_in, ...]; None if it cannot be seen."""
        return self.node._saved_input.detach() if self._node_has_input else self._y

    @property
    def is_seen(self) -> bool:
        """Whether input and weight are known."""
        return (self._node_has_input or self._y is not None) and self.weight is not None

    @property
    def is_trained(self) -> bool:
        """Whether the weight has a gradient."""
        if self.node is not None:
            return self.node.next_functions[self._weight_slot][0] is not None
        return self.weight is not None and self.weight.requires_grad

    def can_have_made(self, x: Tensor) -> bool:
        """Tell whether a tensor of the shape of `x`, its channels aside, can have come of this call."""
        y, rank = self.y, len(self.geometry.kernel) + 2
        return y is not None and y.ndim == x.ndim == rank and len(y) == len(x) and self.output_sizes == x.shape[2:]

    def shared(self) -> dict[Any, Any]:
        """Return what norms that read the same call tell each other."""
        found: dict[Any, Any] = self._shared if self.node is None else self.node.metadata.setdefault(_KEY, {})
        return found

    def hook(self) -> WeightGradientHook | None:
        """Return where to add to the gradient of the weight, one for all norms; None if that is left to autograd."""
        if self.node is None or self.kind != "convolution" or self.weight is None:
            return None
        if self.weight.numel() < _LARGE_WEIGHT or self.geometry.transposed or not self.is_trained:
            return None
        return WeightGradientHook.on(self.node)

    def _read_bias(self, node: Any, channels: int) -> None:
        """Find the Parameter that the bias is, if it is one, and nothing is repeated or broadcast."""
        leaf = _leaf(node, _VIEWS)
        self.bias = leaf if leaf is not None and leaf.shape == (channels,) else None
        self.bias_is_hidden = self.bias is None and node is not None
        self.is_whole = self.bias is not None

    def _free(self) -> Call:
        self.is_freed, self.weight, self.bias = True, None, None
        return self


def convolution_call(node: Any, shape: Shape) -> Call:
    """Return the call of a convolution, perhaps a transposed one, whose output has that shape."""
    _, (weight_node, _), (bias_node, _) = node.next_functions
    call = Call(shape[2:], _leaf(weight_node), node, "convolution")
    if any(node._saved_bias_sym_sizes_opt or ()):  # (0,) or None without one
        call._read_bias(bias_node, shape[1])
    if has_hooks(node._raw_saved_input) or has_hooks(node._raw_saved_weight):
        return call
    weight = node._saved_weight
    if isinstance(weight, nn.Parameter):
        call.parameter = weight
    if is_freed(weight):
        return call._free()
    kernel = node._saved_stride, node._saved_padding, node._saved_dilation
    geometry = _geometry_of_convolution(tuple(weight.shape), *kernel, node._saved_groups, node._saved_transposed)
    return call.see(geometry, None, weight, call.bias)


@functools.lru_cache(4096)
def _geometry_of_convolution(
    weight: Shape, stride: Shape, padding: Shape, dilation: Shape, groups: int, transposed: bool
) -> Geometry:
    outputs, inputs = (weight[1] * groups, weight[0]) if transposed else (weight[0], weight[1] * groups)
    # A single number stands for all dimensions.
    rank = len(weight) - 2
    stride, padding, dilation = (each * rank if len(each) < rank else each for each in (stride, padding, dilation))
    sides = tuple((each, each) for each in padding)
    return Geometry(outputs, inputs, groups, weight[2:], stride, dilation, sides, "zeros", transposed)


def linear_call(node: Any, shape: Shape, norm_shape: Shape) -> Call | None:
    """Return the call of a linear layer that `node`, rows [M, C_in] times a matrix [C_in, C], stands for, if it does.

    Its input is laid out as that of a norm whose input has the shape `norm_shape`.
    """
    batch, channels, *spatial = norm_shape
    is_scaled = hasattr(node, "_saved_alpha") and (node._saved_alpha != 1 or node._saved_beta != 1)
    if is_scaled or shape != (batch * math.prod(spatial), channels):
        return None
    nodes = [each for each, _ in node.next_functions]
    is_sum = len(nodes) == 3  # addmm, else mm
    slot = 2 if is_sum else 1
    call = Call(norm_shape[2:], _leaf(nodes[slot], _VIEWS), node, "linear", slot)
    if is_sum:
        call._read_bias(nodes[0], channels)
    if has_hooks(node._raw_saved_mat1 if is_sum else node._raw_saved_self) or has_hooks(node._raw_saved_mat2):
        return call
    matrix = node._saved_mat2  # None if the other factor is not trained
    call.is_guessed = matrix is None
    call.weight = _matrix_of(call.parameter, channels) if matrix is None else matrix.mT
    if call.weight is not None and is_freed(call.weight):
        return call._free()
    saved = node._saved_mat1 if is_sum else node._saved_self  # None if the weight is frozen
    if call.weight is None or saved is None:
        return call
    y, ones = saved.detach(), (1,) * len(spatial)
    geometry = _geometry_of_linear(channels, y.shape[1], ones)
    return call.see(geometry, y.view(batch, *spatial, -1).movedim(-1, 1) if spatial else y, call.weight, call.bias)


@functools.lru_cache(4096)
def _geometry_of_linear(outputs: int, inputs: int, ones: Shape) -> Geometry:
    return Geometry(outputs, inputs, 1, ones, ones, ones, tuple((0, 0) for _ in ones))


def _matrix_of(parameter: Tensor | None, outputs: int) -> Tensor | None:
    """Return a Parameter as a weight [C, C_in], if it can be one."""
    if parameter is None or parameter.ndim != 2 or outputs not in parameter.shape:
        return None
    return parameter if parameter.shape[0] == outputs else parameter.mT


_VIEWS = frozenset({"ViewBackward0"})
_CASTS = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0", "CloneBackward0", "AliasBackward0"})


def _leaf(node: Any, others: frozenset[str] = frozenset()) -> Tensor | None:
    """Return the Parameter at the end of casts and transpositions, and perhaps of `others`, if it is one."""
    while node is not None and ((name := type(node).__name__) in _CASTS or name in others):
        node = node.next_functions[0][0]
    variable: Tensor | None = getattr(node, "variable", None)
    return variable
