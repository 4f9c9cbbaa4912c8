"""Which inputs the taps of a kernel read: of some output positions, and of all of them together.

Tables that depend on sizes only are made once, except in a compiled step, which folds them itself.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossbn.functional.geometry import Geometry, input_index

_TABLE_ENTRIES = 2**18
_SMALL_TABLE_ENTRIES = 2**13


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

    That is a product of the batch's sum with how often each tap reads each input: in one go for a small map, for a
    large one from sums over everything and over the edges where that will do, else dimension by dimension.
    """
    facts = geometry, tuple(y.shape[2:]), tuple(output_sizes), y.shape[0], y.device, y.dtype
    if torch.compiler.is_compiling():
        return _average_by_dimension(y, counts_by_dimension(*facts))
    if y.shape[2:].numel() * geometry.taps <= _SMALL_TABLE_ENTRIES:
        return y.sum(0).flatten(1) @ _counts_of_all(*facts)
    edges, matrix = _edge_sums(*facts)
    if all(4 * len(edge) <= size for edge, size in zip(edges, y.shape[2:], strict=True)):
        return _sum_blocks(y, edges) @ matrix
    return _average_by_dimension(y, cached_counts(*facts))


def _average_by_dimension(y: Tensor, counts: Sequence[Tensor]) -> Tensor:
    total = y.sum(0)
    for each in counts:  # what is done goes to the end, so the next dimension is always the first
        total = total.movedim(1, -1) @ each
    return total.flatten(1)


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


cached_counts = functools.lru_cache(256)(counts_by_dimension)


@functools.lru_cache(256)
def _counts_of_all(*facts: Any) -> Tensor:
    """Return the same for the flattened space, [inputs, K]."""
    return functools.reduce(torch.kron, counts_by_dimension(*facts))


@functools.lru_cache(256)
def _edge_sums(
    geometry: Geometry, sizes: tuple[int, ...], output_sizes: tuple[int, ...], batch: int, *kind: Any
) -> tuple[list[Tensor], Tensor]:
    """Say how `average_by_tap` follows from `_sum_blocks`.

    With stride 1 a tap reads each index once, but for a few at the edge: a sum over all of them, and one over each of
    those times how often more than once it is read. Over several dimensions that is a Kronecker product.

    Returns:
        The indices at the edge of each dimension, and the matrix [blocks, K] that turns block sums into averages.
    """
    edges, factors = [], []
    for table, output_size in zip(
        counts_by_dimension(geometry, sizes, output_sizes, 1, *kind), output_sizes, strict=True
    ):
        excess = (table * output_size).round() - 1
        edge = excess.any(1).nonzero().squeeze(1)
        edges.append(edge)
        factors.append((torch.ones_like(excess[:1]), excess[edge]))
    rows = [functools.reduce(torch.kron, chosen) for chosen in itertools.product(*factors)]
    return edges, torch.cat(rows) / (batch * torch.Size(output_sizes).numel())


def _sum_blocks(y: Tensor, edges: Sequence[Tensor]) -> Tensor:
    """Sum `y` [N, C, ...] over the batch and, for each choice of dimensions, over the others: [C, blocks]."""
    blocks = []
    for chosen in itertools.product((False, True), repeat=len(edges)):
        part = y
        for dim, edge in enumerate(edges):
            if chosen[dim]:
                part = part.index_select(2 + dim, edge)
        blocks.append(part.sum([0, *(2 + dim for dim, edge in enumerate(chosen) if not edge)]).reshape(y.shape[1], -1))
    return torch.cat(blocks, 1)
