"""Which inputs the taps of a kernel read: of some output positions, and of all of them together.

Tables that depend on sizes only are made once.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from crossbn.functional.geometry import Geometry, input_index

_TABLE_ENTRIES = 2**18


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
    if torch.Size(output_sizes).numel() * geometry.taps > _TABLE_ENTRIES:
        return _taps_at(geometry, place, sizes, output_sizes)
    taps, inside = taps_of_all(geometry, tuple(sizes), tuple(output_sizes), place.device)
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
def taps_of_all(
    geometry: Geometry, sizes: tuple[int, ...], output_sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tables of `taps_at` for every output position."""
    everywhere = torch.arange(torch.Size(output_sizes).numel(), device=device)
    return _taps_at(geometry, everywhere, sizes, output_sizes)


def average_by_tap(y: Tensor, geometry: Geometry, output_sizes: Sequence[int]) -> Tensor:
    """Average what each kernel tap reads of `y` [N, C_in, ...] over all output positions: [C_in, K].

    That is a product of the batch's sum with how often each tap reads each input, dimension by dimension.
    """
    total = y.sum(0)
    for counts in counts_by_dimension(geometry, tuple(y.shape[2:]), tuple(output_sizes), y.shape[0], y.device, y.dtype):
        total = total.movedim(1, -1) @ counts  # what is done goes to the end: the next dimension is always the first
    return total.flatten(1)


@functools.lru_cache(256)
def counts_by_dimension(
    geometry: Geometry,
    sizes: tuple[int, ...],
    output_sizes: tuple[int, ...],
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return how often each tap reads each index along each dimension, [size, K], over the positions in it."""
    tables = []
    for dim, (size, output_size) in enumerate(zip(sizes, output_sizes, strict=True)):
        index, inside = input_index(geometry, dim, torch.arange(output_size, device=device), size)
        counts = torch.zeros(size, geometry.kernel[dim], dtype=dtype, device=device)
        tables.append(counts.scatter_add_(0, index, inside.to(dtype)) / output_size)
    return [*tables[:-1], tables[-1] / batch]
