"""Where a linear operator reads: the map from output positions and kernel taps to input positions.

Convolution, transposed convolution and linear layers, with every stride, dilation and padding, are one thing
seen this way: output channel j at a position is `<W_j, patch>`, the patch being C_in/groups * K inputs whose
places follow dimension by dimension from the position.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TransposedConvolution = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LINEAR_OPERATORS = (*Convolution, *TransposedConvolution, nn.Linear)


_TABLE_ENTRIES = 2**18


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

    @property
    def taps(self) -> int:
        """Number of kernel positions, K."""
        return torch.Size(self.kernel).numel()

    @property
    def patch_size(self) -> int:
        """Numbers an output channel reads at one position, C_in/groups * K."""
        return self.in_channels // self.groups * self.taps

    @property
    def reads_each_input_once(self) -> bool:
        """Whether positions and inputs are the same thing: a linear layer, or a 1x1 convolution on every pixel."""
        plain = all(k == s == 1 for k, s in zip(self.kernel, self.stride, strict=True))
        return plain and all(pair == (0, 0) for pair in self.padding)

    @property
    def may_read_nothing(self) -> bool:
        """Whether some taps fall on zero padding or between the inputs of a transposed convolution."""
        padded = self.padding_mode == "zeros" and any(max(pair) > 0 for pair in self.padding)
        return padded or self.transposed

    @property
    def reads_every_input(self) -> bool:
        """Whether no input is skipped, for any size; else it may be, by a stride, between taps or at the end."""
        return not self.transposed and all(s == d == 1 for s, d in zip(self.stride, self.dilation, strict=True))

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


def _tap_counts(
    geometry: Geometry, dim: int, size: int, output_size: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    index, inside = input_index(geometry, dim, torch.arange(output_size, device=device), size)
    counts = torch.zeros(size, geometry.kernel[dim], dtype=dtype, device=device)
    return counts.scatter_add_(0, index, inside.to(dtype))


_cached_tap_counts = functools.lru_cache(1024)(_tap_counts)


@functools.lru_cache(1024)
def _tap_edges(*facts: Any) -> tuple[Tensor, Tensor]:
    """Return the indices that some tap does not read exactly once, and how often more than that each tap does."""
    excess = _cached_tap_counts(*facts) - 1
    edge = excess.any(1).nonzero().squeeze(1)
    return edge, excess[edge]


def taps_at(
    geometry: Geometry, place: Tensor, sizes: Sequence[int], output_sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return which inputs the positions `place` [P] of a flattened output read, and which of them count.

    Args:
        geometry: the operator.
        place: indices into the flattened output.
        sizes: spatial extent of the input.
        output_sizes: spatial extent of the output.

    Returns:
        Indices into the flattened input [P, K], and 1 or 0 for each, [P, K] (0: see `input_index`).
    """
    entries = torch.Size(output_sizes).numel() * geometry.taps
    if entries > _TABLE_ENTRIES or torch.compiler.is_compiling():
        return _taps_at(geometry, place, sizes, output_sizes)
    taps, inside = _taps_of_all(geometry, tuple(sizes), tuple(output_sizes), place.device)
    return taps[place], inside[place]


def _taps_at(
    geometry: Geometry, place: Tensor, sizes: Sequence[int], output_sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    taps, inside, stride = place.new_zeros(len(place), 1), torch.ones_like(place).unsqueeze(1), 1
    for dim in reversed(range(len(sizes))):
        index, counts = input_index(geometry, dim, place % output_sizes[dim], sizes[dim])
        place = place // output_sizes[dim]
        taps = (stride * index.unsqueeze(2) + taps.unsqueeze(1)).flatten(1)
        inside = (counts.unsqueeze(2) * inside.unsqueeze(1)).flatten(1)
        stride *= sizes[dim]
    return taps, inside.to(torch.uint8)


@functools.lru_cache(128)
def _taps_of_all(
    geometry: Geometry, sizes: tuple[int, ...], output_sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    everywhere = torch.arange(torch.Size(output_sizes).numel(), device=device)
    return _taps_at(geometry, everywhere, sizes, output_sizes)


def sum_by_tap(total: Tensor, geometry: Geometry, dim: int, output_size: int) -> Tensor:
    """Sum `total` [C, ..., size, ...] along one spatial dimension over what each kernel tap reads: [C, ..., K, ...].

    That is a product with how often each tap reads each index. Where it is once, but for a few indices at the edge, a
    plain sum and a small product for those is faster.
    """
    rest = total.movedim(1 + dim, -1)
    facts = geometry, dim, rest.shape[-1], output_size, total.device, total.dtype
    if torch.compiler.is_compiling():
        return (rest @ _tap_counts(*facts)).movedim(-1, 1 + dim)
    edge, excess = _tap_edges(*facts)
    if 4 * len(edge) > rest.shape[-1]:
        return (rest @ _cached_tap_counts(*facts)).movedim(-1, 1 + dim)
    return (rest.sum(-1, keepdim=True) + rest[..., edge] @ excess).movedim(-1, 1 + dim)


def pad_input(y: Tensor, geometry: Geometry) -> tuple[Tensor, Sequence[int]]:
    """Apply the padding that the convolution kernel cannot: return the input and the padding left to it."""
    symmetric = all(before == after for before, after in geometry.padding)
    if geometry.padding_mode == "zeros" and symmetric:
        return y, [before for before, _ in geometry.padding]
    widths = [width for pair in reversed(geometry.padding) for width in pair]
    mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
    return F.pad(y, widths, mode=mode), [0] * len(geometry.padding)
