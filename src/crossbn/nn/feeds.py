"""Which segments feed a norm, call site by call site, and finding those of the call that is running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from crossbn.nn.producer import ActivatedOperator, Operator
from crossbn.nn.scope import CallSite, read_in_forward
from crossbn.nn.segment import Calls, Segment
from crossbn.pairing.calls import Call, convolution_call
from crossbn.pairing.graph import Part, read_calls

if TYPE_CHECKING:
    from crossbn.nn.layer import CrossIterBatchNorm

_MOST_ALTERNATIVES = 4
Feed = tuple[Segment, ...]
"""The segments of a norm, side by side."""


class SegmentInput(NamedTuple):
    """What a segment reads at a step: the calls, and whether its channels are nothing but their sum."""

    segment: Segment
    calls: Calls
    is_complete: bool


class Plain(NamedTuple):
    """Why a norm is BatchNorm at a step."""

    reason: str
    surprising: bool
    """Whether pairing had promised something else."""


class Feeds:
    """The segments of a norm: of each call site those that feed it, more than one choice if its operators vary.

    Attributes:
        unpaired: what becomes of channels that no operator feeds: "pool", "bn" or "error".
        main: the segments of the usual call.
    """

    def __init__(self, norm: CrossIterBatchNorm, unpaired: str) -> None:
        self._norm, self.unpaired = norm, unpaired
        self.main: Feed = ()
        self._by_site: dict[CallSite, list[Feed]] = {}

    def like(self) -> Tensor:
        """Return a tensor of the device and type that statistics are kept in."""
        known = (self._norm.weight, self._norm.running_mean, *(segment.history["mean"] for segment in self.main))
        return next(tensor for tensor in (*known, torch.empty(0)) if tensor is not None)

    def make_segment(
        self, channels: int, operators: Sequence[Operator] = (), direct: bool = False, given: bool = False
    ) -> Segment:
        """Make a segment of the norm; without operators it is pooled only if that is asked for."""
        settings = self._norm.settings
        pooled = bool(operators) or self.unpaired == "pool" or settings.order == 0
        return Segment(channels, operators, settings, self.like(), direct, given, pooled)

    def set_main_(self, segments: Sequence[Segment]) -> None:
        """Let the segments, side by side, feed the usual call, for all that there was."""
        self.release()
        if segments:
            self.add(CallSite(), segments)

    def release(self) -> None:
        """Let go of all segments."""
        for segment in self.segments():
            segment.release()
        self._by_site.clear()
        self.main = ()

    def choices(self) -> Iterator[tuple[CallSite, int, Feed]]:
        """Yield all feeds with their site and the number of the choice there."""
        for site, choices in list(self._by_site.items()):
            for number, feed in enumerate(choices):
                yield site, number, feed

    def segments(self) -> list[Segment]:
        """Return all segments."""
        return [segment for _, _, feed in self.choices() for segment in feed]

    def forget(self) -> None:
        """Clear what all segments remember."""
        for segment in self.segments():
            segment.forget()

    def add(self, site: CallSite, segments: Sequence[Segment]) -> Feed:
        """Let the segments, side by side, be another choice for a site."""
        choices = self._by_site.setdefault(site, [])
        choices[:] = [old for old in choices if _has_operators(old) or _has_steps(old)]
        if len(choices) == _MOST_ALTERNATIVES:
            for segment in choices.pop(0):
                segment.release()
        for segment in segments:
            segment.readers += 1
        choices.append(feed := tuple(segments))
        usual = self._by_site.get(CallSite()) or [()]
        self.main = next((each for each in usual if _has_operators(each)), usual[0])
        return feed

    def find(self, x: Tensor, site: CallSite) -> list[SegmentInput] | Plain:
        """Return what feeds `x` [N, C, ...], the input of the norm's call at `site`, or why nothing does."""
        choices = self._by_site.get(site, [])
        first = choices[0] if choices else ()
        if any(segment.given for segment in first):
            return self.held(self.main, x)
        if self._norm.settings.order == 0:
            return [SegmentInput(s, (), False) for s in first or self._pooled(site, x.shape[1])]
        if (inputs := _usual(first, x)) is not None:
            return inputs
        if x.grad_fn is None:
            known = self.main if site == CallSite() else first
            return self.held(known, x) if choices else self._unpaired(x, site)
        parts = self._read(x)
        for feed in choices:
            if (inputs := _align(feed, parts)) is not None:
                return inputs
        if any(part.calls for part in parts):
            return self._new(parts, site)
        if _has_operators(first):
            held = self.held(first, x)  # by hooks, of calls that ran in a region of their own
            if isinstance(held, list):
                return held
            if self.unpaired != "pool":
                return Plain(f"its input is made otherwise than pairing has found: {_reasons(parts)}", True)
        return self._unpaired(x, site, _reasons(parts))

    def _read(self, x: Tensor) -> tuple[Part, ...]:
        return read_calls(x, self._norm.settings.compensate_through is not None, read_in_forward())

    def inputs_of(self, x: Tensor, feed: Feed) -> list[SegmentInput]:
        """Return what `feed`, which an earlier forward has found, reads in a repetition of it."""
        inputs = None if x.grad_fn is None else _align(feed, self._read(x))
        return inputs or [SegmentInput(segment, (), segment.direct) for segment in feed]

    def held(self, feed: Feed, x: Tensor) -> list[SegmentInput] | Plain:
        """Return what hooks on the modules have seen: where the graph cannot be read."""
        if not feed:
            return Plain("pairing has found no operator, and the graph cannot be read here", False)
        if any(segment.activation is not None for segment in feed):
            return Plain("an activation follows its operator, which only the graph shows", False)
        without_graph = not torch.compiler.is_compiling() and x.grad_fn is None
        inputs = []
        for segment in feed:
            calls = () if segment.storage is None else segment.held_calls(without_graph)
            if segment.storage is not None and not calls:
                return Plain("its operator has not run before it, or where it could not be seen", True)
            if not all(call is None or call.can_have_made(x) for call in calls):  # their channels may be part of `x`
                return Plain("its operator cannot have made its input", True)
            inputs.append(SegmentInput(segment, calls, segment.direct))
        return inputs

    def _unpaired(self, x: Tensor, site: CallSite, reason: str = "without a graph") -> list[SegmentInput] | Plain:
        if self.unpaired == "error":
            raise ValueError(f"no linear operator feeds {self._norm.label}: {reason}")
        if self.unpaired == "bn":
            return Plain(reason, False)
        return [SegmentInput(segment, (), False) for segment in self._pooled(site, x.shape[1])]

    def _pooled(self, site: CallSite, channels: int) -> Feed:
        """Return the feed without operators at a site."""
        for feed in self._by_site.get(site, []):
            if not _has_operators(feed):
                return feed
        return self.add(site, [self.make_segment(channels)])

    def _new(self, parts: Sequence[Part], site: CallSite) -> list[SegmentInput] | Plain:
        """Make segments for what the graph shows."""
        calls = [call for part in parts for call in part.calls]
        if not all(call.is_seen or not call.is_trained for call in calls):
            return Plain(
                "the input of its operator cannot be seen: hooks have packed what is saved for backward", False
            )
        if not all(call.is_seen for call in calls):
            return Plain("the weight of its operator is frozen, and no module is known for it", False)
        if any(call.bias_is_hidden for call in calls):
            return Plain("the bias of its operator is computed from others, and cannot be read", False)
        inputs = _align(self.add(site, [self._segment(part) for part in parts]), parts)
        assert inputs is not None
        return inputs

    def _segment(self, part: Part) -> Segment:
        # Norms that read the same output share its segment.
        shared = part.calls[0].shared() if part.direct else {}
        key = ("segment", self._norm.settings)
        if key not in shared:
            shared[key] = self.make_segment(part.channels, [_operator(part, call) for call in part.calls], part.direct)
        segment: Segment = shared[key]
        return segment


def _operator(part: Part, call: Call) -> Operator:
    if part.activation is None:
        return Operator(call.geometry, call.parameter)
    return ActivatedOperator(call.geometry, call.parameter, part.activation, call.bias is not None)


def _usual(feed: Feed, x: Tensor) -> list[SegmentInput] | None:
    """Return what `_align` would, if one convolution feeds the norm, as it did before: without looking further."""
    if len(feed) == 1 and feed[0].activation is None and type(x.grad_fn).__name__ == "ConvolutionBackward0":
        call = convolution_call(x.grad_fn, tuple(x.shape))
        calls = feed[0].align((call,))
        if calls is not None:
            return [SegmentInput(feed[0], calls, call.is_whole)]
    return None


def _align(feed: Feed, parts: Sequence[Part]) -> list[SegmentInput] | None:
    """Return what the segments of a feed read, if the parts are of its operators."""
    if [segment.channels for segment in feed] != [part.channels for part in parts]:
        return None
    inputs = []
    for segment, part in zip(feed, parts, strict=True):
        if segment.activation != part.activation:
            return None
        calls, is_complete = segment.align(part.calls), part.complete
        if calls is None and not part.calls:
            # Hooks may have seen what ran in a region of its own (activation checkpointing), which has no graph.
            calls, is_complete = segment.held_calls() or None, segment.direct
        if calls is None:
            return None
        inputs.append(SegmentInput(segment, calls, is_complete))
    return inputs


def _reasons(parts: Sequence[Part]) -> str:
    return "; ".join(dict.fromkeys(part.reason for part in parts))


def _has_operators(feed: Feed) -> bool:
    return any(segment.operators for segment in feed)


def _has_steps(feed: Feed) -> bool:
    return any(int(segment.history.num_steps) for segment in feed)
