"""What a source remembers of how its moments change with the weights: gradients, or the samples they are made of.

A form says which tensors it keeps, makes today's (`remember`), and tells of the remembered ones how far the weights
have moved the moments since (`recollect`) and how the pooled statistics follow today's weights (`jacobians`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.call import Call
from crossbn.nn.history import History, Pieces, Row
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Drift, Today
from crossbn.nn.term import Term

Rings = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Observation(NamedTuple):
    """A training step, as the forms look at it."""

    x: Tensor
    today: Today
    bias: Tensor | None
    weights: list[Tensor]
    calls: Sequence[Call | None]
    """One for each term; None for a branch of the sum that this step leaves out, or whose input is not to be seen."""


class Recollection(NamedTuple):
    """What the remembered steps tell at today's weights."""

    drift: Drift
    rows: list[Tensor]
    """[R, 1 + P, groups, I] for each term: of each step the mean patch, then the samples'."""
    change: Tensor | None
    """[R, 1 + P, C]: of the mean, and of the output at the samples."""


class Influence(NamedTuple):
    """How the pooled statistics depend on the remembered moments."""

    weight: Tensor
    """[R, C] or [R, 1]: d mean / d past_mean."""
    own: Tensor
    """[R, C]: d var / d past_var."""
    towards: Tensor
    """[R, C]: d var / d past_mean."""


class Form(ABC):
    """How the sensitivity of a source's moments to the weights of its operators is kept."""

    def __init__(self, terms: tuple[Term, ...], positions: int | None, settings: Settings) -> None:
        self.terms = terms
        self.positions = positions
        self.order = settings.order
        # The mean patch is taken off for its noise; joined processes have different means, and keep it.
        self.centres = not settings.sync

    @abstractmethod
    def shapes(self, channels: int) -> Shapes:
        """Return what is kept of a step."""

    @abstractmethod
    def recollect(self, rings: Rings, weights: list[Tensor]) -> Recollection:
        """Return what the weights' change since has done to each remembered step."""

    @abstractmethod
    def jacobians(self, rings: Rings, recollection: Recollection, influence: Influence) -> tuple[C.Jacobian, ...]:
        """Return how the pooled statistics follow each term's weight."""

    @abstractmethod
    def remember(self, seen: Observation, history: History) -> Row:
        """Return what is to be kept of today."""

    @abstractmethod
    def is_theirs(self, seen: Observation, row: Row, history: History) -> bool | Tensor:
        """Tell whether today's output is what the terms' weights make of their inputs, up to rounding.

        It is if nothing else is added: for sources that are complete, in one process.
        """

    @staticmethod
    def mean_grad_in(row: Row, i: int) -> Tensor | None:
        """Return the mean patch of the `i`-th term in a row, if it is there."""
        found = row.get(f"{i}.rows", row.get(f"{i}.mean_grad"))
        return found.first if isinstance(found, Pieces) else found

    @staticmethod
    def _magnitude(rows: Sequence[Tensor | None], seen: Observation) -> Tensor:
        """Return the sum of the absolute values that products of a row [groups, I] with the weights add up, [C].

        Rounding is relative to that, not to the result, in which they may cancel.
        """
        pairs = zip(rows, seen.weights, strict=True)
        parts = [C.project(row.abs().unsqueeze(0), weight.abs())[0] for row, weight in pairs if row is not None]
        return total([seen.today.mean.abs(), *parts])

    def _samples(self, seen: Observation, history: History) -> tuple[C.Places, Tensor]:
        """Choose today's positions; return them and the outputs there, less their mean [P, C]."""
        x = seen.x
        places = C.sample_places(len(x), x.shape[2:].numel(), self.positions, history.step, x.device)
        return places, C.outputs_at(x, places).sub_(seen.today.mean)

    def _patches(self, call: Call, places: C.Places, mean_grad: Tensor) -> Tensor:
        assert call.y is not None
        patches = C.patches_at(call.y, call.geometry, places, call.output_sizes)
        return patches.sub_(mean_grad) if self.centres else patches


_TOLERANCE = 0.02
_TOLERANCE_OF_HALVES = 0.2  # bfloat16 and float16 round the output


def agree(
    got: Tensor, expected: Tensor, scale: Tensor, magnitude: Callable[[], Tensor], dtype: torch.dtype
) -> bool | Tensor:
    """Tell whether two vectors are the same up to rounding.

    Args:
        got: [C].
        expected: [C].
        scale: [C]: squares of what counts as much.
        magnitude: returns what rounding is relative to, [C]; asked only if it matters.
        dtype: of the output that they were computed from.
    """
    tolerance = _TOLERANCE if dtype in (torch.float32, torch.float64) else _TOLERANCE_OF_HALVES
    difference, allowed = (got - expected).square().sum(), tolerance**2 * scale.sum()
    readable = difference.is_cpu and not torch.compiler.is_compiling()
    if readable and difference <= allowed:
        return True
    fits = difference <= allowed + (64 * torch.finfo(dtype).eps * magnitude()).square().sum()
    return bool(fits) if readable else fits


def total(tensors: list[Tensor]) -> Tensor:
    """Add tensors up."""
    return functools.reduce(torch.add, tensors)


def add_to(row: Rings, name: str, term: Tensor) -> None:
    """Add a term to what a row has under a name, if anything."""
    row[name] = row[name] + term if name in row else term
