"""What a saved history is of: settings and operators of its source, as numbers, so that a file says what it fits.

| numbers | what |
|---|---|
| version, order, sync, layers, narrow | of the format; settings that decide what a step's numbers mean |
| channels, direct, pooled, terms | of the source, and how many operators |
| out, in, groups, transposed, mode, rank | of each operator |
| kernel, stride, dilation, padding before, padding after | the same, for each of its dimensions |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from crossbn.functional import Geometry
from crossbn.nn.settings import Settings
from crossbn.nn.source import Source
from crossbn.nn.term import Term

_VERSION = 1
_MODES = ("zeros", "reflect", "replicate", "circular")
_OF_SETTINGS = 5


def layout_of(source: Source) -> Tensor:
    """Return the numbers of a source."""
    numbers = [*_of_settings(source.settings), source.channels, source.direct, source.pooled, len(source.terms)]
    for term in source.terms:
        numbers += _of_geometry(term.geometry)
    return torch.tensor([int(number) for number in numbers])


def mismatch(source: Source, layout: Tensor) -> str | None:
    """Say what keeps a history with that layout from being taken over by `source`, if anything."""
    own = layout_of(source)
    if layout.dtype != own.dtype or layout.ndim != 1:
        return f"its layout is {layout}"
    if not torch.equal(layout[:_OF_SETTINGS], own[:_OF_SETTINGS]):
        return f"it was saved with other settings: {layout[:_OF_SETTINGS].tolist()} for {own[:_OF_SETTINGS].tolist()}"
    # Whether the source is known to be direct does not change what is remembered.
    known = [i for i in range(len(own)) if i != _OF_SETTINGS + 1]
    if layout.shape != own.shape or not torch.equal(layout[known], own[known]):
        return f"it was saved of other operators: {layout[_OF_SETTINGS:].tolist()} for {own[_OF_SETTINGS:].tolist()}"
    return None


def source_of(layout: Tensor, settings: Settings, like: Tensor, label: str) -> Source:
    """Make the source that a layout is of; its operators are found at the first forward.

    Raises:
        ValueError: if the numbers are not those of a layout.
    """
    try:
        numbers = iter(layout[_OF_SETTINGS:].tolist())
        channels, direct, pooled, terms = (next(numbers) for _ in range(4))
        made = tuple(Term(_geometry_of(numbers), None) for _ in range(terms))
    except (StopIteration, RuntimeError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{label}: its saved layout makes no sense: {layout}") from error
    return Source(channels, made, settings, like, bool(direct), pooled=bool(pooled), label=label)


def _of_settings(settings: Settings) -> list[int]:
    return [_VERSION, settings.order, settings.sync, settings.layers, settings.history_dtype is not None]


def _of_geometry(geometry: Geometry) -> list[int]:
    sides = [side for pair in geometry.padding for side in pair]
    mode = _MODES.index(geometry.padding_mode)
    first = [geometry.out_channels, geometry.in_channels, geometry.groups, geometry.transposed, mode]
    return [*first, len(geometry.kernel), *geometry.kernel, *geometry.stride, *geometry.dilation, *sides]


def _geometry_of(numbers: Iterator[int]) -> Geometry:
    outputs, inputs, groups, transposed, mode, rank = (next(numbers) for _ in range(6))
    kernel, stride, dilation = (tuple(next(numbers) for _ in range(rank)) for _ in range(3))
    padding = tuple((next(numbers), next(numbers)) for _ in range(rank))
    return Geometry(outputs, inputs, groups, kernel, stride, dilation, padding, _MODES[mode], bool(transposed))
