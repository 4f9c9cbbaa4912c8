"""Where a linear operator reads: the map from output positions and kernel taps to input positions.

Convolution, transposed convolution and linear layers, with every stride, dilation and padding, are one thing
seen this way: output channel j at a position is `<W_j, patch>`, the patch being C_in/groups * K inputs whose
places follow dimension by dimension from the position.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TransposedConvolution = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LINEAR_OPERATORS = (*Convolution, *TransposedConvolution, nn.Linear)
_MODES = ("zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class Geometry:
    """Shape of a linear operator; the spatial tuples have one entry per dimension, none for `nn.Linear`."""

    out_channels: int
    in_channels: int
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()  # before and after
    padding_mode: str = "zeros"
    transposed: bool = False

    def __post_init__(self) -> None:
        # What is asked for at every step is worked out once, now: a compiled step cannot fill a cache.
        for name in ("taps", "patch_size", "reads_each_input_once", "may_read_nothing", "reads_every_input"):
            getattr(self, name)

    @cached_property
    def taps(self) -> int:
        """Number of kernel positions, K."""
        return math.prod(self.kernel)

    @cached_property
    def patch_size(self) -> int:
        """Numbers an output channel reads at one position, C_in/groups * K."""
        return self.in_channels // self.groups * self.taps

    @cached_property
    def _is_padded(self) -> bool:
        return any(pair != (0, 0) for pair in self.padding)

    @cached_property
    def reads_each_input_once(self) -> bool:
        """Whether positions and inputs are the same thing: a linear layer, or a 1x1 convolution on every pixel."""
        # A dilation lets a transposed convolution append positions to its output, that of a single tap too.
        dense = set(self.dilation) <= {1} or not self.transposed
        return self.taps == 1 and set(self.stride) <= {1} and not self._is_padded and dense

    @cached_property
    def may_read_nothing(self) -> bool:
        """Whether some taps fall on zero padding or between the inputs of a transposed convolution."""
        return self.transposed or (self.padding_mode == "zeros" and self._is_padded)

    @cached_property
    def reads_every_input(self) -> bool:
        """Whether no input is skipped, for any size; else it may be, by a stride, between taps or at the end."""
        return not self.transposed and set(self.stride) <= {1} and set(self.dilation) <= {1}

    def output_padding(self, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> list[int]:
        """Positions that a transposed convolution has appended to its output; a call may choose them."""
        if not self.transposed:
            return [0] * len(self.kernel)
        return [
            output - ((size - 1) * stride - 2 * padding[0] + dilation * (kernel - 1) + 1)
            for output, size, stride, padding, dilation, kernel in zip(
                output_sizes, input_sizes, self.stride, self.padding, self.dilation, self.kernel, strict=True
            )
        ]

    def numbers(self) -> list[int]:
        """Return the geometry as numbers, for what can hold nothing else."""
        sides = [side for pair in self.padding for side in pair]
        first = [
            self.out_channels,
            self.in_channels,
            self.groups,
            int(self.transposed),
            _MODES.index(self.padding_mode),
        ]
        return [*first, len(self.kernel), *self.kernel, *self.stride, *self.dilation, *sides]

    @classmethod
    def from_numbers(cls, numbers: Iterator[int]) -> "Geometry":
        """Take what `numbers` returned off the front."""
        outputs, inputs, groups, transposed, mode, rank = (next(numbers) for _ in range(6))
        kernel, stride, dilation = (tuple(next(numbers) for _ in range(rank)) for _ in range(3))
        padding = tuple((next(numbers), next(numbers)) for _ in range(rank))
        return cls(outputs, inputs, groups, kernel, stride, dilation, padding, _MODES[mode], bool(transposed))


def is_linear_operator(module: nn.Module) -> bool:
    """Tell whether a module is a convolution, transposed convolution or linear layer that computes as torch's does.

    A subclass with a forward of its own may use other weights or another padding than its attributes say.
    """
    kind = next((kind for kind in LINEAR_OPERATORS if isinstance(module, kind)), None)
    if kind is None:
        return False
    methods = ("forward", "_conv_forward") if kind in Convolution else ("forward",)
    return all(getattr(type(module), name) is getattr(kind, name) for name in methods)


def geometry_of(module: nn.Module) -> Geometry:
    """Read the geometry off a convolution, transposed convolution or linear layer.

    Raises:
        TypeError: for any other module.

    Example:
        >>> geometry_of(nn.Conv1d(4, 6, 3, padding="same", groups=2)).padding
        ((1, 1),)
    """
    if not is_linear_operator(module):
        raise TypeError(
            f"a producer must be a convolution, transposed convolution or linear layer with torch's own forward, "
            f"got {module!r}"
        )
    if isinstance(module, nn.Linear):
        return Geometry(module.out_features, module.in_features)
    assert isinstance(module, (*Convolution, *TransposedConvolution))
    padding: tuple[tuple[int, int], ...]
    if isinstance(module.padding, str):
        # "same" puts the odd one behind; "valid" is no padding at all.
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        padding = tuple((t // 2, t - t // 2) if module.padding == "same" else (0, 0) for t in total)
    else:
        padding = tuple((p, p) for p in module.padding)
    return Geometry(
        module.out_channels,
        module.in_channels,
        module.groups,
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(module.dilation),
        padding,
        module.padding_mode,
        isinstance(module, TransposedConvolution),
    )


def flatten_weight(weight: Tensor, geometry: Geometry) -> Tensor:
    """Arrange an operator's weight as one row per output channel, [C_out, C_in/groups * K]; differentiable."""
    if not geometry.transposed:
        return weight.flatten(1)
    per_group = weight.unflatten(0, (geometry.groups, -1)).transpose(1, 2)
    return per_group.reshape(geometry.out_channels, geometry.patch_size)


def unflatten_weight(flat: Tensor, geometry: Geometry) -> Tensor:
    """Arrange rows per output channel as the operator's own weight; the inverse of `flatten_weight`."""
    g, kernel = geometry.groups, geometry.kernel
    if not geometry.transposed:
        return flat.reshape(geometry.out_channels, -1, *kernel)
    return flat.reshape(g, geometry.out_channels // g, -1, *kernel).transpose(1, 2).flatten(0, 1)


def input_index(geometry: Geometry, dim: int, output: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return which input index each kernel tap reads for each output index along one spatial dimension.

    Args:
        geometry: the operator.
        dim: spatial dimension.
        output: output indices [S].
        size: the input's extent in that dimension.

    Returns:
        The input indices [S, K_dim], all legal, and whether they count [S, K_dim] (False where the tap falls
        on zero padding, or between the inputs of a transposed convolution).
    """
    stride, before = geometry.stride[dim], geometry.padding[dim][0]
    reach = torch.arange(geometry.kernel[dim], device=output.device) * geometry.dilation[dim]
    if geometry.transposed:
        spread = output.unsqueeze(1) + before - reach
        index = spread.div(stride, rounding_mode="floor")
        inside = (spread % stride == 0) & (index >= 0) & (index < size)
        return index.clamp(0, size - 1), inside
    index = output.unsqueeze(1) * stride + reach - before
    if geometry.padding_mode == "zeros":
        return index.clamp(0, size - 1), (index >= 0) & (index < size)
    if geometry.padding_mode == "circular":
        index = index % size
    elif geometry.padding_mode == "reflect":
        index = (size - 1) - ((size - 1) - index.abs()).abs()
    else:
        index = index.clamp(0, size - 1)
    return index, torch.ones_like(index, dtype=torch.bool)


def pad_input(y: Tensor, geometry: Geometry) -> tuple[Tensor, Sequence[int]]:
    """Apply the padding that the convolution kernel cannot: return the input and the padding left to it."""
    symmetric = all(before == after for before, after in geometry.padding)
    if geometry.padding_mode == "zeros" and symmetric:
        return y, [before for before, _ in geometry.padding]
    widths = [width for pair in reversed(geometry.padding) for width in pair]
    mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
    return F.pad(y, widths, mode=mode), [0] * len(geometry.padding)
