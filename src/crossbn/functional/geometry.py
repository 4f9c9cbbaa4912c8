"""The shape of a linear operator.

Convolution, transposed convolution and linear layers, with every stride, dilation and padding, are one thing here:
output channel j at a position is `<W_j, patch>`, the patch being I = C_in/groups * K inputs whose places follow
dimension by dimension from the position (`sensitivity.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
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

    @property
    def taps(self) -> int:
        """Number of kernel positions, K."""
        return math.prod(self.kernel)

    @property
    def patch_size(self) -> int:
        """Numbers an output channel reads at one position, C_in/groups * K."""
        return self.in_channels // self.groups * self.taps

    @property
    def reads_each_input_once(self) -> bool:
        """Whether positions and inputs are the same thing: a linear layer, or a 1x1 convolution on every pixel."""
        # A dilation lets a transposed convolution append positions to its output, that of a single tap too.
        dense = not self.transposed or set(self.dilation) <= {1}
        return self.taps == 1 and set(self.stride) <= {1} and set(self.padding) <= {(0, 0)} and dense

    @property
    def may_read_nothing(self) -> bool:
        """Whether some taps fall on zero padding or between the inputs of a transposed convolution."""
        return self.transposed or (self.padding_mode == "zeros" and not set(self.padding) <= {(0, 0)})

    @property
    def reads_every_input(self) -> bool:
        """Whether no input is skipped, for any size; else it may be, by a stride, between taps or at the end."""
        return not self.transposed and set(self.stride) <= {1} and set(self.dilation) <= {1}

    def numbers(self) -> list[int]:
        """Return the geometry as numbers, for what can hold nothing else."""
        kind = int(self.transposed), _MODES.index(self.padding_mode), len(self.kernel)
        sides = [side for pair in self.padding for side in pair]
        channels = self.out_channels, self.in_channels, self.groups
        return [*channels, *kind, *self.kernel, *self.stride, *self.dilation, *sides]

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
    """
    if not is_linear_operator(module):
        raise TypeError(
            f"a producer must be a convolution, transposed convolution or linear layer with torch's own forward, "
            f"got {module!r}"
        )
    if isinstance(module, nn.Linear):
        return Geometry(module.out_features, module.in_features)
    assert isinstance(module, (*Convolution, *TransposedConvolution))
    kernel, stride, dilation = tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation)
    if isinstance(module.padding, str):
        # "same" puts the odd one behind; "valid" is no padding at all.
        total = [d * (k - 1) if module.padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((t // 2, t - t // 2) for t in total)
    else:
        padding = tuple((p, p) for p in module.padding)
    channels, transposed = (module.out_channels, module.in_channels), isinstance(module, TransposedConvolution)
    return Geometry(*channels, module.groups, kernel, stride, dilation, padding, module.padding_mode, transposed)


def flatten_weight(weight: Tensor, geometry: Geometry, bias: Tensor | None = None) -> Tensor:
    """Arrange an operator's weight as one row per output channel, [C_out, C_in/groups * K]; differentiable.

    A bias, if given, is one more column.
    """
    rows = weight.flatten(1)
    if geometry.transposed:
        per_group = weight.unflatten(0, (geometry.groups, -1)).transpose(1, 2)
        rows = per_group.reshape(geometry.out_channels, geometry.patch_size)
    return rows if bias is None else torch.cat([rows, bias.unsqueeze(1).to(rows.dtype)], 1)


def unflatten_weight(flat: Tensor, geometry: Geometry) -> Tensor:
    """Arrange rows per output channel as the operator's own weight; the inverse of `flatten_weight`."""
    g, kernel = geometry.groups, geometry.kernel
    if not geometry.transposed:
        return flat.reshape(geometry.out_channels, -1, *kernel)
    return flat.reshape(g, geometry.out_channels // g, -1, *kernel).transpose(1, 2).flatten(0, 1)
