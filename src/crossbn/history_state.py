"""Saving, restoring, shortening and forgetting what the cross-iteration norms of a model remember.

A state has plain tensors, by names of three parts: the norm, the place of a segment in it, and what it is.

| name | what |
|---|---|
| norm/burnt | progress of burn-in |
| norm/0/mean, norm/0/pushed, ... | what the first segment of the norm remembers |
| norm/0/layout | what it is of, see `history_layout`; files of before have none |
| norm/stream#1#0/0/mean | the same at another call site: its stream, the number of the call, and of the choice |
| norm/0/of | the segment is that of another norm: its name, as bytes |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from crossbn.convert import cross_iteration_norms
from crossbn.history_layout import layout_of, misfit, mismatch, segment_of
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.feeds import make_feed
from crossbn.nn.scope import CallSite
from crossbn.nn.segment import Segment

_MOST_STEPS = 2**53
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
    norms = cross_iteration_norms(model)
    state = {f"{name}/burnt": norm.burnt.clone() for name, norm in norms.items()}
    owners: dict[int, str] = {}
    for place, segment in _places(norms):
        owner = owners.setdefault(id(segment), place)
        if owner != place:
            state[f"{place}/of"] = torch.tensor(list(owner.encode()), dtype=torch.uint8)
            continue
        state[f"{place}/layout"] = layout_of(segment)
        state |= {f"{place}/{name}": tensor.clone() for name, tensor in segment.history.state()}
    return state


def load_history_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over what `history_state` returned for a model converted the same way.

    Load the model's `state_dict` first: loading weights forgets the history.

    Raises:
        ValueError: naming the layer whose history does not fit; then nothing is changed.
    """
    norms = cross_iteration_norms(model)
    if not isinstance(state, Mapping) or (norms and not any(key.endswith("/burnt") for key in state)):
        raise ValueError("this is no history state: it has no burn-in of any norm, see crossbn.history_state")
    parts: _Parts = {}
    for key, tensor in state.items():
        owner, _, name = key.rpartition("/")
        parts.setdefault(owner, {})[name] = tensor
    burnt = {name: _burnt(name, parts.pop(name, {})) for name in norms}
    present = dict(_places(norms))
    made = _make_missing(norms, parts, present)
    segments, saved = {**present, **made}, {owner: part for owner, part in parts.items() if "of" not in part}
    for owner, part in saved.items():
        layout = part.pop("layout", None)
        problem = misfit(segments[owner].history, part)
        if problem is None and layout is not None:
            problem = mismatch(segments[owner], layout)
        if problem is not None:
            raise ValueError(f"{owner}: {problem}")
    owners: dict[int, str] = {}
    for owner, segment in present.items():
        owners.setdefault(id(segment), owner)
    unsaved = [owner for owner in owners.values() if owner not in parts]
    for owner in unsaved:
        if present[owner].producers:
            raise ValueError(f"{owner}: {misfit(present[owner].history, {})}")
    # All is checked; nothing has been changed so far.
    for owner in unsaved:
        present[owner].forget()
    _add_feeds(norms, made)
    for owner, part in saved.items():
        segments[owner].history.load_(part)
        for operator in segments[owner].operators:
            operator.parameter = None  # it is the weight of the next forward, whatever object that is
    for name, norm in norms.items():
        norm.burnt.copy_(burnt[name])


def set_window_(model: nn.Module, window: int) -> None:
    """Change the window of every cross-iteration norm now; the latest steps that fit are kept.

    Raises:
        ValueError: if the model has no such norm, or the window is below 1.
    """
    norms = cross_iteration_norms(model)
    if not norms:
        raise ValueError("set_window_ needs a converted model, this one has no cross-iteration norm")
    for norm in norms.values():
        norm.configure_(replace(norm.settings, window=window))


def reset_history_(model: nn.Module) -> None:
    """Forget the remembered steps and the progress of burn-in of every cross-iteration norm of `model`."""
    for norm in cross_iteration_norms(model).values():
        norm.reset_history_()


def _places(norms: _Norms) -> Iterator[tuple[str, Segment]]:
    """Yield every segment of every norm with the name of its place, shared ones several times."""
    for name, norm in norms.items():
        for site, choice, feed in norm.feeds.choices():
            where = f"{name}/{site.stream}#{site.number}#{choice}" if site != CallSite() or choice else name
            for number, segment in enumerate(feed):
                yield f"{where}/{number}", segment


def _burnt(name: str, part: Mapping[str, Tensor]) -> Tensor:
    if part.keys() != {"burnt"}:
        raise ValueError(f"{name}: the history state should have its burn-in, has {sorted(part)}")
    burnt = part["burnt"]
    if burnt.dtype is not torch.int64 or burnt.ndim or not 0 <= int(burnt) <= _MOST_STEPS:
        raise ValueError(f"{name}: burnt must be an int64 from 0 on, got {burnt}")
    return burnt


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
            made[owner] = segment_of(part["layout"], norm.settings, norm.feeds.like(), norm.label)
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
        norms[norm].feeds.add(site, make_feed([by_number[number] for number in sorted(by_number)]))
