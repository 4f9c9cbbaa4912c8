"""One call of a linear operator at one training step: what it read, with which weight, and its place in the graph."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.functional import Geometry
from crossbn.ops.weight_gradient_hook import WeightGradientHook
from crossbn.torch_internals import has_hooks, is_freed

Shape = tuple[int, ...]
_KEY = "crossbn"
_LARGE_WEIGHT = 2**15  # below, adding two gradients costs less than a hook


class Call:
    """A call of a convolution, a transposed convolution or a linear layer; it lives as long as a norm looks at it.

    Attributes:
        kind: what people call it.
        geometry: of the operator, if input and weight are seen.
        y: the input without its graph, [N, C_in, ...]; None if it cannot be seen.
        weight: the effective one; None if it cannot be seen.
        bias: the Parameter that the bias is; None if there is none, or it is hidden.
        trained: weight and bias as gradients find them, where those above are copies of values that are gone (FSDP).
        parameter: the Parameter that the weight is, or is a cast of; None if it is computed from others.
        is_guessed: whether the weight is what its Parameter is, as far as the graph tells: a node does not keep it.
        is_freed: whether the weight's memory has been given back.
        bias_is_hidden: whether the bias is computed from others: the graph does not have its value.
        is_whole: whether the operator's output is the weight's and the visible bias's doing alone.
        output_sizes: spatial extent of the output.
    """

    kind = "operator"
    geometry: Geometry

    def __init__(self, parameter: Tensor | None, output_sizes: Shape) -> None:
        self.parameter = parameter
        self.output_sizes = torch.Size(output_sizes)
        self.y: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.trained: tuple[Tensor | None, Tensor | None] | None = None
        self.is_guessed = False
        self.is_freed = False
        self.bias_is_hidden = False
        self.is_whole = True

    @property
    def is_seen(self) -> bool:
        """Whether input and weight are known."""
        return self.y is not None and self.weight is not None

    @property
    def is_trained(self) -> bool:
        """Whether the weight has a gradient."""
        return self.weight is not None and self.weight.requires_grad

    def can_have_made(self, x: Tensor) -> bool:
        """Tell whether a tensor of the shape of `x`, its channels aside, can have come of this call."""
        y, rank = self.y, len(self.geometry.kernel) + 2
        return y is not None and y.ndim == x.ndim == rank and len(y) == len(x) and self.output_sizes == x.shape[2:]

    def shared(self) -> dict[Any, Any]:
        """Return statistics of this call by segment, for the next norm that reads it."""
        return {}

    def hook(self) -> WeightGradientHook | None:
        """Return where to add to the gradient of the weight; None if that is left to autograd."""
        return None


class SeenCall(Call):
    """A call that a forward hook has seen: in a compiled step, and where saved tensors are packed."""

    def __init__(self, geometry: Geometry, y: Tensor, weight: Tensor, bias: Tensor | None, output_sizes: Shape) -> None:
        super().__init__(weight if isinstance(weight, nn.Parameter) else None, output_sizes)
        self.geometry, self.y, self.weight, self.bias = geometry, y, weight, bias
        self._shared: dict[Any, Any] = {}

    def shared(self) -> dict[Any, Any]:
        """Return statistics of this call by segment, for the next norm that reads it."""
        return self._shared


class NodeCall(Call):
    """A call that the graph has a node of."""

    weight_slot: int

    def __init__(self, node: Any, parameter: Tensor | None, output_sizes: Shape) -> None:
        super().__init__(parameter, output_sizes)
        self.node = node

    def see(self, other: SeenCall) -> None:
        """Take over input and weight from what a hook has seen of the same call."""
        self.geometry, self.y, self.weight, self.bias = other.geometry, other.y, other.weight, other.bias
        self.trained = other.trained

    @property
    def is_trained(self) -> bool:
        """Whether the weight has a gradient."""
        return self.node.next_functions[self.weight_slot][0] is not None

    def shared(self) -> dict[Any, Any]:
        """Return statistics of this call by segment, for the next norm that reads it."""
        found: dict[Any, Any] = self.node.metadata.setdefault(_KEY, {})
        return found


class ConvolutionCall(NodeCall):
    """A call of a convolution or a transposed one."""

    kind = "convolution"
    weight_slot = 1

    def __init__(self, node: Any, shape: Shape) -> None:
        _, weight_edge, bias_edge = node.next_functions
        super().__init__(node, _leaf(weight_edge[0]), shape[2:])
        if any(node._saved_bias_sym_sizes_opt or ()):  # (0,) or None without one
            self.bias = _bias(bias_edge[0], shape[1])
            self.bias_is_hidden = self.bias is None and bias_edge[0] is not None
            self.is_whole = self.bias is not None
        if has_hooks(node._raw_saved_input) or has_hooks(node._raw_saved_weight):
            return
        weight = node._saved_weight
        self.parameter = weight if isinstance(weight, nn.Parameter) else self.parameter
        if is_freed(weight):
            self.is_freed, self.bias = True, None
            return
        self.y, self.weight = node._saved_input.detach(), weight
        self.geometry = _geometry_of_convolution(
            tuple(weight.shape),
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_groups,
            node._saved_transposed,
        )

    def hook(self) -> WeightGradientHook | None:
        """Return where to add to the gradient of the weight, one for all norms that read the call."""
        if (
            self.weight is None
            or self.weight.numel() < _LARGE_WEIGHT
            or self.geometry.transposed
            or not self.is_trained
        ):
            return None
        return WeightGradientHook.on(self.node)


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


class AddmmCall(NodeCall):
    """A call of a linear layer: rows [M, C_in] times a matrix [C_in, C]."""

    kind = "linear"

    @classmethod
    def of(cls, node: Any, shape: Shape, norm_shape: Shape) -> AddmmCall | None:
        """Return the call that `node` stands for, its input laid out as that of a norm whose input is `norm_shape`."""
        plain = not hasattr(node, "_saved_alpha") or (node._saved_alpha == 1 and node._saved_beta == 1)
        positions = norm_shape[0] * math.prod(norm_shape[2:])
        return cls(node, norm_shape) if plain and shape == (positions, norm_shape[1]) else None

    def __init__(self, node: Any, norm_shape: Shape) -> None:
        edges = [edge for edge, _ in node.next_functions]
        is_sum = len(edges) == 3  # addmm, else mm
        self.weight_slot = 2 if is_sum else 1
        super().__init__(node, _leaf(edges[self.weight_slot], _VIEWS), norm_shape[2:])
        if is_sum:
            self.bias = _bias(edges[0], norm_shape[1])
            self.bias_is_hidden = self.bias is None and edges[0] is not None
            self.is_whole = self.bias is not None
        if has_hooks(node._raw_saved_mat1 if is_sum else node._raw_saved_self) or has_hooks(node._raw_saved_mat2):
            return
        self.is_guessed = node._saved_mat2 is None
        self.weight = _matrix(node, self.parameter)
        if self.weight is not None and is_freed(self.weight):
            self.is_freed, self.weight, self.bias = True, None, None
        saved = node._saved_mat1 if is_sum else node._saved_self  # None if the weight is frozen
        if self.weight is None or saved is None:
            return
        y, spatial = saved.detach(), norm_shape[2:]
        self.y = y.view(norm_shape[0], *spatial, -1).movedim(-1, 1) if spatial else y
        self.geometry = _geometry_of_linear(norm_shape[1], y.shape[1], (1,) * len(spatial))


@functools.lru_cache(4096)
def _geometry_of_linear(outputs: int, inputs: int, ones: Shape) -> Geometry:
    return Geometry(outputs, inputs, 1, ones, ones, ones, tuple((0, 0) for _ in ones))


def _matrix(node: Any, parameter: Tensor | None) -> Tensor | None:
    """Return the weight [C, C_in] of a product, which the node has only if its other factor is trained."""
    saved = node._saved_mat2
    if saved is not None:
        return saved.mT
    if parameter is None:
        return None
    outputs = int(node._input_metadata[0].shape[1])
    if parameter.ndim != 2 or outputs not in parameter.shape:
        return None
    return parameter if parameter.shape[0] == outputs else parameter.mT


def _bias(node: Any, channels: int) -> Tensor | None:
    """Return the Parameter that a bias is, if it is one, and nothing is repeated or broadcast."""
    leaf = _leaf(node, _VIEWS)
    return leaf if leaf is not None and leaf.shape == (channels,) else None


_VIEWS = frozenset({"ViewBackward0"})
_CASTS = frozenset({"ToCopyBackward0", "TBackward0", "TransposeBackward0", "CloneBackward0", "AliasBackward0"})


def _leaf(node: Any, others: frozenset[str] = frozenset()) -> Tensor | None:
    """Return the Parameter at the end of casts and transpositions, and perhaps of `others`, if it is one."""
    while node is not None and ((name := type(node).__name__) in _CASTS or name in others):
        node = node.next_functions[0][0]
    variable: Tensor | None = getattr(node, "variable", None)
    return variable
