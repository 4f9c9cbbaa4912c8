"""Saving, restoring and forgetting what the cross-iteration norms of a model remember.

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

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crossbn.convert import cross_iteration_norms
from crossbn.history_layout import layout_of, misfit, mismatch, segment_of
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.feeds import make_feed
from crossbn.nn.scope import CallSite
from crossbn.nn.segment import Segment

_MOST_STEPS = 2**53
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
        owner = owners.setdefault(id(segment), str(place))
        if owner != str(place):
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
    _check_burn_in(norms, parts)
    present = {str(place): segment for place, segment in _places(norms)}
    made = _make_missing(norms, parts, present)
    saved = {owner: part for owner, part in parts.items() if owner not in norms and "of" not in part}
    for owner, part in saved.items():
        segment, layout = made.get(owner) or present[owner], part.pop("layout", None)
        problem = misfit(segment.history, part) or (None if layout is None else mismatch(segment, layout))
        if problem is not None:
            raise ValueError(f"{owner}: {problem}")
    forgotten = []
    for owner, segment in present.items():
        if owner not in parts and _is_first(owner, segment, present):
            if segment.producers:
                raise ValueError(f"{owner}: {misfit(segment.history, {})}")
            forgotten.append(segment)
    for segment in forgotten:
        segment.forget()
    _take_over(norms, parts, saved, {**present, **made}, made)


class _Place(NamedTuple):
    """Where in a model a segment is."""

    norm: str
    site: CallSite
    choice: int
    number: int

    def __str__(self) -> str:
        if self.site == CallSite() and self.choice == 0:
            return f"{self.norm}/{self.number}"
        return f"{self.norm}/{self.site.stream}#{self.site.number}#{self.choice}/{self.number}"

    @classmethod
    def of(cls, owner: str) -> _Place | None:
        """Return the place of that name, if it is one."""
        norm, *middle, number = owner.split("/") if "/" in owner else (owner, "")
        if len(middle) > 1 or not number.isdecimal():
            return None
        if not middle:
            return cls(norm, CallSite(), 0, int(number))
        stream, *rest = middle[0].split("#")
        if len(rest) != 2 or not all(each.isdecimal() for each in rest):
            return None
        return cls(norm, CallSite(stream, int(rest[0])), int(rest[1]), int(number))


def _places(norms: Mapping[str, CrossIterBatchNorm]) -> Iterator[tuple[_Place, Segment]]:
    """Yield every segment of every norm, shared ones several times."""
    for name, norm in norms.items():
        for site, choice, feed in norm.feeds.choices():
            for number, segment in enumerate(feed):
                yield _Place(name, site, choice, number), segment


def _is_first(owner: str, segment: Segment, present: Mapping[str, Segment]) -> bool:
    return next(name for name, other in present.items() if other is segment) == owner


def _check_burn_in(norms: Mapping[str, CrossIterBatchNorm], parts: _Parts) -> None:
    for name in norms:
        part = parts.get(name, {})
        if part.keys() != {"burnt"}:
            raise ValueError(f"{name}: the history state should have its burn-in, has {sorted(part)}")
        burnt = part["burnt"]
        if burnt.dtype is not torch.int64 or burnt.ndim or not 0 <= int(burnt) <= _MOST_STEPS:
            raise ValueError(f"{name}: burnt must be an int64 from 0 on, got {burnt}")


def _make_missing(
    norms: Mapping[str, CrossIterBatchNorm], parts: _Parts, present: Mapping[str, Segment]
) -> dict[str, Segment]:
    """Make the segments that the state has and the model, which has not run yet, has not."""
    made: dict[str, Segment] = {}
    for owner, part in parts.items():
        if owner in norms or owner in present:
            continue
        place = _Place.of(owner)
        if place is None or place.norm not in norms or not ("of" in part or "layout" in part):
            key = f"{owner}/{next(iter(part))}"
            raise ValueError(f"the history state has {key!r}, for which the model has no layer")
        norm = norms[place.norm]
        if "layout" in part:
            made[owner] = segment_of(part["layout"], norm.settings, norm.feeds.like(), norm.label)
    for owner, part in parts.items():
        if "of" in part and owner not in present:
            other = bytes(part["of"].tolist()).decode(errors="replace")
            if other not in made and other not in present:
                raise ValueError(f"{owner}: the history state says it is that of {other!r}, which is not there")
            made[owner] = made.get(other) or present[other]
    return made


def _take_over(
    norms: Mapping[str, CrossIterBatchNorm],
    parts: _Parts,
    saved: _Parts,
    segments: Mapping[str, Segment],
    made: Mapping[str, Segment],
) -> None:
    feeds: dict[tuple[str, CallSite, int], dict[int, Segment]] = {}
    for owner, segment in made.items():
        place = _Place.of(owner)
        assert place is not None
        feeds.setdefault((place.norm, place.site, place.choice), {})[place.number] = segment
    for (name, site, _), by_number in sorted(feeds.items()):
        norms[name].feeds.add(site, make_feed([by_number[number] for number in sorted(by_number)]))
    for owner, part in saved.items():
        segments[owner].history.load_(part)
        for operator in segments[owner].operators:
            operator.parameter = None  # it is the weight of the next forward, whatever object that is
    for name, norm in norms.items():
        norm.burnt.copy_(parts[name]["burnt"])


def reset_history_(model: nn.Module) -> None:
    """Forget the remembered steps and the progress of burn-in of every cross-iteration norm of `model`."""
    for norm in cross_iteration_norms(model).values():
        norm.reset_history_()
