"""What a saved history is of: settings and operators of its segment, as numbers, so that a file says what it fits.

Whatever a file holds is looked at before anything is taken from it.

| numbers | what |
|---|---|
| version, order, sync, 1, narrow | of the format; settings that decide what a step's numbers mean |
| channels, direct, pooled, terms | of the segment, and how many operators |
| out, in, groups, transposed, mode, rank | of each operator |
| kernel, stride, dilation, padding before, padding after | the same, for each of its dimensions |
| has bias, kind, options | of an activation that follows, if one does |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from crossbn.functional import BY_AGE, SAMPLES, Activation, Geometry, Settings
from crossbn.nn.history import History
from crossbn.nn.producer import ActivatedOperator, Operator
from crossbn.nn.segment import Segment

_VERSIONS = {"equal": 1, "auto": 2}
"""By `Settings.weights`: only files with a variogram are of a kind that older releases do not know."""
_OF_SETTINGS = 5


def layout_of(segment: Segment) -> Tensor:
    """Return the numbers of a segment."""
    numbers = [*_of_settings(segment.settings), segment.channels, segment.direct, segment.pooled]
    numbers.append(len(segment.operators))
    for operator in segment.operators:
        numbers += operator.geometry.numbers()
        if isinstance(operator, ActivatedOperator):
            numbers += [operator.has_bias, *operator.activation.numbers()]
    return torch.tensor([int(number) for number in numbers])


def mismatch(segment: Segment, layout: Tensor) -> str | None:
    """Say what keeps a history with that layout from being taken over by `segment`, if anything."""
    own = layout_of(segment)
    if layout.dtype != own.dtype or layout.ndim != 1:
        return f"its layout is {layout}"
    if not torch.equal(layout[:_OF_SETTINGS], own[:_OF_SETTINGS]):
        return f"it was saved with other settings: {layout[:_OF_SETTINGS].tolist()} for {own[:_OF_SETTINGS].tolist()}"
    # Whether the segment is known to be direct does not change what is remembered.
    known = [i for i in range(len(own)) if i != _OF_SETTINGS + 1]
    if layout.shape != own.shape or not torch.equal(layout[known], own[known]):
        return f"it was saved of other operators: {layout[_OF_SETTINGS:].tolist()} for {own[_OF_SETTINGS:].tolist()}"
    return None


def segment_of(layout: Tensor, settings: Settings, like: Tensor, label: str) -> Segment:
    """Make the segment that a layout is of; its operators are found at the first forward.

    Raises:
        ValueError: if the numbers are not those of a layout.
    """
    try:
        numbers = iter(layout[_OF_SETTINGS:].tolist())
        channels, direct, pooled, terms = (next(numbers) for _ in range(4))
        made = [Operator(Geometry.from_numbers(numbers), None) for _ in range(terms)]
        if (has_bias := next(numbers, None)) is not None:
            made = [ActivatedOperator(made[0].geometry, None, Activation.from_numbers(numbers), bool(has_bias))]
    except (StopIteration, RuntimeError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{label}: its saved layout makes no sense: {layout}") from error
    return Segment(channels, made, settings, like, bool(direct), pooled=bool(pooled))


def _of_settings(settings: Settings) -> list[int]:
    return [_VERSIONS[settings.weights], settings.order, settings.sync, 1, settings.history_dtype is not None]


def misfit(history: History, state: Mapping[str, Tensor]) -> str | None:
    """Say what keeps `state` from being loaded into `history`, if anything."""
    own = dict(history.state())
    if (different := own.keys() ^ state.keys()) == set(BY_AGE):
        kinds = ("equal", "auto") if different <= own.keys() else ("auto", "equal")
        said = 'the saved history is of weights="{0}", this one of weights="{1}": convert with weights="{0}"'
        said += ", or the decay that it was trained with" if kinds[0] == "equal" else ""
        return said.format(*kinds)
    if different:
        return f"the saved history and this one do not share {', '.join(sorted(different))}"
    for name, value in own.items():
        saved = state[name].shape
        if name == "mean" and saved[:1] != value.shape[:1]:
            return f"the saved history is of window {saved[0] + 1}, this one of window {history.slots + 1}"
        # Samples are as many as the largest batch so far needed.
        sampled = name.endswith(SAMPLES)
        if saved[:1] + saved[2:] != value.shape[:1] + value.shape[2:] if sampled else saved != value.shape:
            return f"{name} has the shape {tuple(value.shape)} here and {tuple(saved)} in the saved history"
    return _nonsense_in(state)


_MOST_STEPS = 2**53
"""More than any training has, and a number that every type of numbers can count to."""


def _nonsense_in(state: Mapping[str, Tensor]) -> str | None:
    """Say what no history can hold, if `state` does."""
    num_steps = state["pushed"]
    if num_steps.dtype is not torch.int64 or not 0 <= int(num_steps) <= _MOST_STEPS:
        return f"pushed must be an int64 from 0 on, got {num_steps}"
    widths = {name: tensor.shape[1] for name, tensor in state.items() if name.endswith(SAMPLES)}
    if len(set(widths.values())) > 1:
        return f"the samples of a step differ in number: {widths}"
    for name, tensor in state.items():
        if name != "pushed" and not tensor.is_floating_point():
            return f"{name} must be of a floating type, got {tensor.dtype}"
        if not tensor.isfinite().all():
            return f"{name} is not finite"
        if name in ("var", "count", *BY_AGE) and (tensor < 0).any():
            return f"{name} is below 0"
    return None
