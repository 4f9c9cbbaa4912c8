"""Cross-iteration norms that are not the paper's: what might come nearer to exact statistics over the window.

Each variant changes a network whose norms are there, before its training. What it has to know is the length of the
training (`Span`). A variant has to earn its place in the norms by a table first; votes that fall with age have, as
`decay`, and are no longer here.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn.convert import cross_iteration_norms
from crossbn.nn.history import History, Pieces
from crossbn.nn.source import Source
from crossbn.recalibrate import recalibrate_

_MOMENTS = ("mean", "var")
_AT_ONCE = 256  # images; the more there are, the less do the first of them see of statistics that are not settled


class Span(NamedTuple):
    """How long a training is, in forwards."""

    steps: int
    burn_in: int


Votes = Callable[[Tensor, Tensor], Tensor]
"""From the ages [R] of remembered steps, 1 for the latest, and how many have been remembered []: their weights [R]."""


@dataclass(frozen=True)
class Growing:
    """Votes of 1 in a window that grows as the learning rate falls, and of 0 beyond.

    Weights move in proportion to the learning rate, so that a window in proportion to its inverse is one over which
    they move about as far at any time. With the rate along a cosine, r = (1 + cos(pi * step / steps)) / 2, that is
    `least * r(burn_in) / r(step)`, rounded down: `least` at the end of burn-in, at most what the history holds.

    Example:
        >>> growing = Growing(2, Span(steps=100, burn_in=0))
        >>> [int(growing.window(torch.tensor(step))) for step in (0, 50, 67, 99)]
        [2, 4, 8, 8106]
        >>> growing(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor(50))
        tensor([1., 1., 1., 0.])
    """

    least: int
    span: Span

    def window(self, pushed: Tensor) -> Tensor:
        """Return the steps to pool, today's included, when so many have been remembered since burn-in."""
        share = (self.span.burn_in + pushed.double()) / self.span.steps
        rate = 1 + torch.cos(math.pi * share.clamp(max=1))
        first = 1 + math.cos(math.pi * self.span.burn_in / self.span.steps)
        return (self.least * first / rate).floor().clamp_min(self.least)

    def __call__(self, ages: Tensor, pushed: Tensor) -> Tensor:
        """Return the votes."""
        return (ages < self.window(pushed)).to(ages.dtype)


class VotingHistory(History):
    """A history whose steps do not all have one vote, made of one in use: it has the same places."""

    def __init__(self, history: History, votes: Votes) -> None:
        self.__setstate__(history.__getstate__())
        self.votes = votes

    def recall(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return what is remembered, [R, ...] by name, and the votes of the R steps; 0 for those that are not there."""
        rings, present = super().recall()
        votes = self.votes(_ages(self, len(rings["mean"])), self.pushed)
        return rings, votes if present is None else votes * present


class ExtrapolatingHistory(History):
    """A history that moves its moments on by what they turned out to lack.

    A norm compensates for the weights of its own operator. What the layers before have changed is in today's moments
    and not in the remembered ones. That is taken to grow evenly with age: a moment of age a is recalled with
    `a * slope` added, by channel. The slope is a slow average of today's moments less the compensated remembered ones,
    slope included, over their mean age; it begins to move when all places are filled. It is part of the state.

    Args:
        history: of `source`.
        source: to ask for compensated moments.
        rate: of the average.
    """

    def __init__(self, history: History, source: Source, rate: float) -> None:
        self.__setstate__(history.__getstate__())
        self.source = source
        self.rate = rate
        self.slopes = {name: torch.zeros_like(history[name][0]) for name in _MOMENTS}

    def recall(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return what is remembered, [R, ...] by name, moved on, and which of the R steps are there."""
        rings, present = super().recall()
        steps = len(rings["mean"])
        ages = _ages(self, steps).unsqueeze(1)
        moved = {name: torch.addcmul(rings[name], ages, slope) for name, slope in self.slopes.items()}
        # Never None: compiled code would remember the step without `push`.
        return rings | moved, rings["mean"].new_ones(steps) if present is None else present

    def push(self, row: Mapping[str, Tensor | Pieces], accept: bool | Tensor) -> None:
        """Learn from the step what the remembered ones lack, and remember it, if `accept`."""
        past = self.source.past()
        counts = (self.pushed >= self.slots) & accept
        for name, remembered in zip(_MOMENTS, (past.compensated_mean, past.compensated_var), strict=True):
            today = row[name]
            assert isinstance(today, Tensor)
            lacking = torch.where(counts, today - remembered.mean(0), 0.0)
            self.slopes[name].add_(lacking, alpha=self.rate * 2 / (self.slots + 1))
        super().push(row, accept)

    def apply_(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply it to the slopes as well."""
        super().apply_(function)
        self.slopes = {name: slope.to(self[name]) for name, slope in self.slopes.items()}

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name."""
        yield from super().state()
        yield from ((f"{name}_slope", slope) for name, slope in self.slopes.items())


def _ages(history: History, steps: int) -> Tensor:
    """Return how many steps ago the first `steps` places were written to, 1 for the latest."""
    places = torch.arange(steps, device=history.pushed.device)
    return ((history.pushed - 1 - places) % history.slots + 1).to(history["mean"].dtype)


def give_votes_(network: nn.Module, votes: Votes) -> nn.Module:
    """Let every cross-iteration norm of `network` weigh remembered steps by `votes`; return the network."""
    return _replace_histories_(network, lambda source: VotingHistory(source.history, votes))


def extrapolate_(network: nn.Module, rate: float) -> nn.Module:
    """Let every cross-iteration norm of `network` move remembered moments on; return the network."""
    return _replace_histories_(network, lambda source: ExtrapolatingHistory(source.history, source, rate))


def _replace_histories_(network: nn.Module, make: Callable[[Source], History]) -> nn.Module:
    sources = {id(source): source for norm in cross_iteration_norms(network).values() for source in norm.sources}
    if not sources:
        raise ValueError("this variant needs a converted network, this one has no cross-iteration norm")
    for source in sources.values():
        source.history = make(source)
    return network


class Recalibrated(nn.Module):
    """A network whose running statistics are replaced before it is evaluated: `recalibrate_` on the latest batches.

    Running statistics are averages over weights that have changed since. These are of the weights in use. Training,
    which reads no running statistics, is the network's own. The remembered images are in the `state_dict`.

    Args:
        network: takes one batch of images; any norms.
        batches: how many of the latest training batches count, all images alike.

    Example:
        >>> network = Recalibrated(nn.Sequential(nn.BatchNorm1d(1, momentum=0.1)), batches=1)
        >>> _ = network(torch.tensor([[0.0], [2.0]]))
        >>> network.eval()(torch.tensor([[1.0]])).item()
        0.0
    """

    def __init__(self, network: nn.Module, batches: int = 128) -> None:
        super().__init__()
        self.network = network
        self._recent: deque[Tensor] = deque(maxlen=batches)
        self._outdated = False

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's scores of `images` [N, ...]."""
        if self.training and torch.is_grad_enabled():
            self._recent.append(images.detach())
            self._outdated = True
        elif not self.training and self._outdated:
            recalibrate_(self.network, torch.cat(list(self._recent)).split(_AT_ONCE))
            self._outdated = False
        return self.network(images)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what a training goes on from beside parameters and buffers."""
        return {"recent": list(self._recent), "outdated": self._outdated}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_extra_state` returned."""
        device = next((parameter.device for parameter in self.parameters()), None)
        self._recent.clear()
        self._recent.extend(images.to(device) for images in state["recent"])
        self._outdated = state["outdated"]


Variant = Callable[[nn.Module, Span], nn.Module]


VARIANTS: Mapping[str, Variant] = {
    "growing from 2": lambda network, span: give_votes_(network, Growing(2, span)),
    "extrapolated": lambda network, _: extrapolate_(network, 0.02),
    "recalibrated": lambda network, _: Recalibrated(network, 128),
}
"""By what a cell is told; the name stands for all numbers in it."""
