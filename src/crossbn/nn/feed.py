"""Which sources feed a norm, call site by call site, and finding those of the call that is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.nn.call import ConvolutionCall
from crossbn.nn.graph import Part, read_calls
from crossbn.nn.scope import CallSite
from crossbn.nn.settings import Settings
from crossbn.nn.source import Calls, Source
from crossbn.nn.term import Term

_MOST_ALTERNATIVES = 4


class Segment(NamedTuple):
    """A run of channels, `start` to `stop`, and what feeds it."""

    source: Source
    start: int
    stop: int


class Input(NamedTuple):
    """What a segment reads at a step: the calls, and whether its channels are nothing but their sum."""

    segment: Segment
    calls: Calls
    complete: bool


Feed = tuple[Segment, ...]
Like = Callable[[], Tensor]
"""Returns a tensor of the device and type that statistics are kept in."""


class Plain(NamedTuple):
    """Why a norm is BatchNorm at a step."""

    reason: str
    surprising: bool
    """Whether pairing had promised something else."""


def make_feed(sources: Sequence[Source]) -> Feed:
    """Return the sources side by side."""
    segments, start = [], 0
    for source in sources:
        source.readers += 1
        segments.append(Segment(source, start, start + source.channels))
        start += source.channels
    return tuple(segments)


class Feeds:
    """The sources of a norm: of each call site those that feed it, more than one choice if its operators vary.

    Attributes:
        settings: of the norm.
        unpaired: what becomes of channels that no operator feeds: "pool", "bn" or "error".
        label: of the norm.
    """

    def __init__(self, settings: Settings, unpaired: str, label: str) -> None:
        self.settings, self.unpaired, self.label = settings, unpaired, label
        self._by_site: dict[CallSite, list[Feed]] = {}
        self.main: Feed = ()
        """The sources of the usual call."""

    def set_main_(self, feed: Feed) -> None:
        """Take `feed`, for all that there was."""
        self.release()
        if feed:
            self._by_site[CallSite()] = [feed]
        self.main = feed

    def release(self) -> None:
        """Let go of all sources."""
        for source in self.sources():
            source.release()
        self._by_site.clear()
        self.main = ()

    def choices(self) -> Iterator[tuple[CallSite, int, Feed]]:
        """Yield all feeds with their site and the number of the choice there."""
        for site, choices in list(self._by_site.items()):
            for number, feed in enumerate(choices):
                yield site, number, feed

    def sources(self) -> list[Source]:
        """Return all sources."""
        return [segment.source for _, _, feed in self.choices() for segment in feed]

    def add(self, site: CallSite, feed: Feed) -> None:
        """Remember another choice for a site."""
        choices = self._by_site.setdefault(site, [])
        for old in [o for o in choices if not any(s.source.terms for s in o) and not _has_steps(o)]:
            choices.remove(old)
        if len(choices) == _MOST_ALTERNATIVES:
            for segment in choices.pop(0):
                segment.source.release()
        choices.append(feed)
        usual = self._by_site.get(CallSite()) or [()]
        self.main = next((each for each in usual if any(s.source.terms for s in each)), usual[0])

    def find(self, x: Tensor, site: CallSite, like: Like) -> list[Input] | Plain:
        """Return what feeds `x` [N, C, ...], the input of the norm's call at `site`, or why nothing does."""
        choices = self._by_site.get(site, [])
        first = choices[0] if choices else ()
        if torch.compiler.is_compiling() or any(s.source.given for s in first):
            return self._held(self.main, x)
        if self.settings.order == 0:
            return [Input(s, (), False) for s in first or self._pooled(site, x.shape[1], like)]
        if (inputs := _usual(first, x)) is not None:
            return inputs
        if x.grad_fn is None:
            known = self.main if site == CallSite() else first
            return self._held(known, x) if choices else self._unpaired(x, site, like)
        parts = read_calls(x)
        for feed in choices:
            if (inputs := _align(feed, parts)) is not None:
                return inputs
        if any(part.calls for part in parts):
            return self._new(parts, site, like)
        if any(s.source.terms for s in first):
            held = self._held(first, x)  # by hooks, of calls that ran in a region of their own
            if isinstance(held, list) or self.unpaired != "pool":
                reason = f"its input is made otherwise than pairing has found: {_reasons(parts)}"
                return held if isinstance(held, list) else Plain(reason, True)
        return self._unpaired(x, site, like, _reasons(parts))

    def inputs_of(self, x: Tensor, feed: Feed) -> list[Input]:
        """Return what `feed`, which an earlier forward has found, reads in a repetition of it."""
        inputs = None if x.grad_fn is None else _align(feed, read_calls(x))
        return inputs or [Input(segment, (), segment.source.direct) for segment in feed]

    def _held(self, feed: Feed, x: Tensor) -> list[Input] | Plain:
        """Return what hooks on the modules have seen."""
        if not feed:
            return Plain("pairing has found no operator, and the graph cannot be read here", False)
        without_graph = not torch.compiler.is_compiling() and x.grad_fn is None
        inputs = []
        for segment in feed:
            source = segment.source
            calls = source.held_calls(without_graph) if source.form is not None else ()
            if source.form is not None and not calls:
                return Plain("its operator has not run before it, or where it could not be seen", True)
            if not all(call is None or call.can_have_made(x) for call in calls):  # their channels may be part of `x`
                return Plain("its operator cannot have made its input", True)
            inputs.append(Input(segment, calls, source.direct))
        return inputs

    def _unpaired(self, x: Tensor, site: CallSite, like: Like, reason: str = "without a graph") -> list[Input] | Plain:
        if self.unpaired == "error":
            raise ValueError(f"no linear operator feeds {self.label}: {reason}")
        if self.unpaired == "bn":
            return Plain(reason, False)
        return [Input(segment, (), False) for segment in self._pooled(site, x.shape[1], like)]

    def _pooled(self, site: CallSite, channels: int, like: Like) -> Feed:
        """Return the feed without operators at a site."""
        for feed in self._by_site.get(site, []):
            if not any(segment.source.terms for segment in feed):
                return feed
        feed = make_feed([Source(channels, (), self.settings, like(), label=self.label)])
        self.add(site, feed)
        return feed

    def _new(self, parts: Sequence[Part], site: CallSite, like: Like) -> list[Input] | Plain:
        """Make sources for what the graph shows."""
        if not all(call.is_seen or not call.is_trained for part in parts for call in part.calls):
            return Plain(
                "the input of its operator cannot be seen: hooks have packed what is saved for backward", False
            )
        if not all(call.is_seen for part in parts for call in part.calls):
            return Plain("the weight of its operator is frozen, and no module is known for it", False)
        if any(call.bias_is_hidden for part in parts for call in part.calls):
            return Plain("the bias of its operator is computed from others, and cannot be read", False)
        feed = make_feed([self._source(part, like) for part in parts])
        self.add(site, feed)
        inputs = _align(feed, parts)
        assert inputs is not None
        return inputs

    def _source(self, part: Part, like: Like) -> Source:
        terms = tuple(Term(call.geometry, call.leaf) for call in part.calls)
        pooled = bool(terms) or self.unpaired == "pool"

        def make() -> Source:
            return Source(part.channels, terms, self.settings, like(), part.direct, pooled=pooled, label=self.label)

        if not part.direct:
            return make()
        # Norms that read the same output share its source.
        shared, key = part.calls[0].shared(), ("source", self.settings)
        if key not in shared:
            shared[key] = make()
        source: Source = shared[key]
        return source


def _usual(feed: Feed, x: Tensor) -> list[Input] | None:
    """Return what `_align` would, if one convolution feeds the norm, as it did before: without looking further."""
    if len(feed) == 1 and type(x.grad_fn).__name__ == "ConvolutionBackward0":
        call = ConvolutionCall(x.grad_fn, tuple(x.shape))
        calls = feed[0].source.align((call,))
        if calls is not None:
            return [Input(feed[0], calls, call.is_whole)]
    return None


def _align(feed: Feed, parts: Sequence[Part]) -> list[Input] | None:
    """Return what the segments of a feed read, if the parts are of its operators."""
    if [segment.source.channels for segment in feed] != [part.channels for part in parts]:
        return None
    inputs = []
    for segment, part in zip(feed, parts, strict=True):
        source = segment.source
        calls, complete = source.align(part.calls), part.complete
        if calls is None and not part.calls:
            # Hooks may have seen what ran in a region of its own (activation checkpointing), which has no graph.
            calls, complete = source.held_calls() or None, source.direct
        if calls is None:
            return None
        inputs.append(Input(segment, calls, complete))
    return inputs


def _reasons(parts: Sequence[Part]) -> str:
    return "; ".join(dict.fromkeys(part.reason for part in parts))


def _has_steps(feed: Feed) -> bool:
    return any(int(segment.source.history.pushed) for segment in feed)
