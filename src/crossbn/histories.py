"""Saving, restoring, shortening and forgetting what the cross-iteration norms of a model remember.

A state has plain tensors, by names of three parts: the norm, the place of a segment in it, and what it is.

| name | what |
|---|---|
| norm/burnt | progress of burn-in |
| norm/drift | with a prior: how far the norm has drifted from the checkpoint |
| norm/0/mean, norm/0/pushed, ... | what the first segment of the norm remembers |
| norm/0/layout | what it is of; files of before have none |
| norm/stream#1#0/0/mean | the same at another call site: its stream, the number of the call, and of the choice |
| norm/0/of | the segment is that of another norm: its name, as bytes |

A layout says settings and operators of a segment as numbers. Whatever a file holds is looked at before anything is
taken from it.

| numbers | what |
|---|---|
| version, order, sync, 1, narrow | of the format; settings that decide what a step's numbers mean |
| channels, direct, pooled, terms | of the segment, and how many operators |
| out, in, groups, transposed, mode, rank | of each operator |
| kernel, stride, dilation, padding before, padding after | the same, for each of its dimensions |
| has bias, kind, options | of an activation that follows, if one does |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from crossbn.convert import check_module, cross_iteration_norms
from crossbn.functional import Activation, Geometry, Settings
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.history import wrong_count
from crossbn.nn.producer import ActivatedOperator, Operator
from crossbn.nn.scope import CallSite
from crossbn.nn.segment import Segment

_VERSIONS = {"equal": 1, "auto": 2}
"""By `Settings.weights`: only files with a variogram are of a kind that older releases do not know."""
_OF_SETTINGS = 5
_PLACE = re.compile(r"([^/]*)(?:/([^/#]*)#([0-9]+)#([0-9]+))?/([0-9]+)")  # norm, stream, call, choice, segment
_Norms = Mapping[str, CrossIterBatchNorm]
_Parts = dict[str, dict[str, Tensor]]


def history_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what the norms of `model` remember, for a checkpoint beside `state_dict`: names to copied tensors.

    Example:
        >>> from crossbn import convert_
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> report = convert_(model, window=3)
        >>> sorted(history_state(model))[:3]
        ['1/0/0.mean_grad', '1/0/0.var_grad', '1/0/count']
    """
    check_module("history_state", model)
    norms = cross_iteration_norms(model)
    state = {f"{name}/burnt": norm.burnt.clone() for name, norm in norms.items()}
    state |= {f"{name}/drift": norm.belief.drift.clone() for name, norm in norms.items() if norm.belief is not None}
    owners: dict[Segment, str] = {}
    for place, segment in _places(norms):
        owner = owners.setdefault(segment, place)
        if owner == place:
            state[f"{place}/layout"] = _layout_of(segment)
            state |= {f"{place}/{name}": tensor.clone() for name, tensor in segment.history.state()}
        else:
            state[f"{place}/of"] = torch.tensor(list(owner.encode()), dtype=torch.uint8)
    return state


def load_history_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over what `history_state` returned for a model converted the same way.

    Load the model's `state_dict` first: loading weights forgets the history.

    Raises:
        ValueError: naming the layer whose history does not fit; then nothing is changed.
    """
    check_module("load_history_state", model)
    norms = cross_iteration_norms(model)
    if not norms:
        raise ValueError("the model has no cross-iteration norm: convert it before its history is loaded")
    if not isinstance(state, Mapping) or not any(key.endswith("/burnt") for key in state):
        raise ValueError("this is no history state: it has no burn-in of any norm, see crossbn.history_state")
    parts: _Parts = {}
    for key, tensor in state.items():
        owner, _, name = key.rpartition("/")
        parts.setdefault(owner, {})[name] = tensor
    own = {name: _own_state(name, norm, parts.pop(name, {})) for name, norm in norms.items()}
    if not any("drift" in part for part in own.values()) and any(norm.belief is not None for norm in norms.values()):
        raise ValueError("the saved history is of norms without a prior, these have prior='running': convert without")
    present = dict(_places(norms))
    made = _make_missing(norms, parts, present)
    segments, saved = {**present, **made}, {owner: part for owner, part in parts.items() if "of" not in part}
    for owner, part in saved.items():
        segment, layout = segments[owner], part.pop("layout", None)
        problem = segment.history.misfit(part) or _mismatch(segment, layout)
        if problem is not None:
            raise ValueError(f"{owner}: {problem}")
    owners: dict[Segment, str] = {}
    for owner, segment in present.items():
        owners.setdefault(segment, owner)
    unsaved = {segment: owner for segment, owner in owners.items() if owner not in parts}
    for segment, owner in unsaved.items():
        if segment.producers:
            raise ValueError(f"{owner}: {segment.history.misfit({})}")
    # All is checked; nothing has been changed so far.
    for segment in unsaved:
        segment.forget()
    _add_feeds(norms, made)
    for owner, part in saved.items():
        segments[owner].history.load_(part)
        for operator in segments[owner].operators:
            operator.parameter = None  # it is the weight of the next forward, whatever object that is
    for name, norm in norms.items():
        norm.burnt.copy_(own[name]["burnt"])
        norm.set_drift_(own[name].get("drift"))


def set_window_(model: nn.Module, window: int) -> None:
    """Change the window of every cross-iteration norm now; the latest steps that fit are kept.

    Raises:
        ValueError: if the model has no such norm, or the window is below 1.
    """
    check_module("set_window_", model)
    norms = cross_iteration_norms(model)
    if not norms:
        raise ValueError("set_window_ needs a converted model, this one has no cross-iteration norm")
    for norm in norms.values():
        norm.configure_(replace(norm.settings, window=window))


def reset_history_(model: nn.Module) -> None:
    """Forget the remembered steps and the progress of burn-in of every cross-iteration norm of `model`."""
    check_module("reset_history_", model)
    for norm in cross_iteration_norms(model).values():
        norm.reset_history_()


def _places(norms: _Norms) -> Iterator[tuple[str, Segment]]:
    """Yield every segment of every norm with the name of its place, shared ones several times."""
    for name, norm in norms.items():
        for site, choice, feed in norm.feeds.choices():
            where = f"{name}/{site.stream}#{site.number}#{choice}" if site != CallSite() or choice else name
            for number, segment in enumerate(feed):
                yield f"{where}/{number}", segment


def _own_state(name: str, norm: CrossIterBatchNorm, part: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return what a norm has saved of its own, burn-in and drift, after a look at it."""
    if part.keys() - {"drift"} != {"burnt"}:
        raise ValueError(f"{name}: the history state should have its burn-in, has {sorted(part)}")
    if (problem := wrong_count("burnt", part["burnt"])) is not None:
        raise ValueError(f"{name}: {problem}")
    if "drift" in part and norm.settings.prior is None:
        raise ValueError(f"{name}: the saved history is of prior='running', this norm has none: convert with the same")
    drift = part.get("drift")
    if drift is not None and (not isinstance(drift, Tensor) or drift.shape != (1,) or not 0 <= float(drift) < math.inf):
        raise ValueError(f"{name}: drift should be a vector of one finite number, not below 0")
    return part


def _make_missing(norms: _Norms, parts: _Parts, present: Mapping[str, Segment]) -> dict[str, Segment]:
    """Make the segments that the state has and the model, which has not run yet, has not."""
    made: dict[str, Segment] = {}
    missing = {owner: part for owner, part in parts.items() if owner not in present}
    for owner, part in missing.items():
        place = _PLACE.fullmatch(owner)
        if place is None or place[1] not in norms or not part.keys() & {"of", "layout"}:
            key = f"{owner}/{next(iter(part))}"
            raise ValueError(f"the history state has {key!r}, for which the model has no layer")
        norm = norms[place[1]]
        if "layout" in part:
            made[owner] = _segment_of(part["layout"], norm.settings, norm.feeds.like(), norm.label)
    for owner, part in missing.items():
        if "of" in part:
            other = bytes(part["of"].tolist()).decode(errors="replace")
            if other not in made and other not in present:
                raise ValueError(f"{owner}: the history state says it is that of {other!r}, which is not there")
            made[owner] = made.get(other) or present[other]
    return made


def _add_feeds(norms: _Norms, made: Mapping[str, Segment]) -> None:
    feeds: dict[tuple[str, CallSite, int], dict[int, Segment]] = {}
    for owner, segment in made.items():
        place = _PLACE.fullmatch(owner)
        assert place is not None
        norm, stream, call, choice, number = place.groups(default="0")
        site = CallSite(stream, int(call)) if place[2] is not None else CallSite()
        feeds.setdefault((norm, site, int(choice)), {})[int(number)] = segment
    for (norm, site, _), by_number in sorted(feeds.items()):
        norms[norm].feeds.add(site, [by_number[number] for number in sorted(by_number)])


def _layout_of(segment: Segment) -> Tensor:
    settings = segment.settings
    numbers = [_VERSIONS[settings.weights], settings.order, settings.sync, 1, settings.history_dtype is not None]
    numbers += [segment.channels, segment.direct, segment.pooled, len(segment.operators)]
    for operator in segment.operators:
        numbers += operator.geometry.numbers()
        if isinstance(operator, ActivatedOperator):
            numbers += [operator.has_bias, *operator.activation.numbers()]
    return torch.tensor([int(number) for number in numbers])


def _mismatch(segment: Segment, layout: Tensor | None) -> str | None:
    """Say what keeps a history with that layout from being taken over by `segment`, if anything."""
    if layout is None:
        return None
    own = _layout_of(segment)
    if layout.dtype != own.dtype or layout.ndim != 1:
        return f"its layout is {layout}"
    if not torch.equal(layout[:_OF_SETTINGS], own[:_OF_SETTINGS]):
        return f"it was saved with other settings: {layout[:_OF_SETTINGS].tolist()} for {own[:_OF_SETTINGS].tolist()}"
    # Whether the segment is known to be direct does not change what is remembered.
    known = [i for i in range(len(own)) if i != _OF_SETTINGS + 1]
    if layout.shape != own.shape or not torch.equal(layout[known], own[known]):
        return f"it was saved of other operators: {layout[_OF_SETTINGS:].tolist()} for {own[_OF_SETTINGS:].tolist()}"
    return None


def _segment_of(layout: Tensor, settings: Settings, like: Tensor, label: str) -> Segment:
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
        return Segment(channels, made, settings, like, bool(direct), pooled=bool(pooled))
    except (StopIteration, RuntimeError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{label}: its saved layout makes no sense: {layout}") from error
