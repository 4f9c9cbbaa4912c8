"""What a source remembers of how its moments change with the weights: gradients, or the samples they are made of.

A form says which tensors it keeps, makes today's (`remember`), and tells of the remembered ones how far the weights
have moved the moments since (`recollect`) and how the pooled statistics follow today's weights (`jacobians`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.history import History, Pieces, Row
from crossbn.nn.producer import Producer
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import Drift, Today

Rings = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Observation(NamedTuple):
    """A training step, as the forms look at it."""

    x: Tensor
    today: Today
    bias: Tensor | None
    weights: list[Tensor]
    label: str


class Recollection(NamedTuple):
    """What the remembered steps tell at today's weights."""

    drift: Drift
    rows: list[Tensor]
    """[R, 1 + P, groups, I] for each producer: of each step the mean patch, then the samples'."""
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
    """How the sensitivity of a source's moments to the weights of its producers is kept."""

    arrays: tuple[str | None, ...]
    """What `functional.native.Memory` has of a history with one producer, from `mean` to `var_at`; None for nothing."""

    def __init__(
        self, producers: tuple[Producer, ...], direct: bool, positions: int | None, settings: Settings
    ) -> None:
        self.producers = producers
        self.direct = direct  # the channels are the output of the one producer, nothing added
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
        """Return how the pooled statistics follow each producer's weight."""

    @abstractmethod
    def remember(self, seen: Observation, history: History) -> Row:
        """Return what is to be kept of today."""

    @staticmethod
    def mean_grad_in(row: Row, i: int) -> Tensor | None:
        """Return the mean patch of the `i`-th producer in a row, if it is there."""
        found = row.get(f"{i}.rows", row.get(f"{i}.mean_grad"))
        return found.first if isinstance(found, Pieces) else found

    def _samples(self, seen: Observation, history: History) -> tuple[C.Places, Tensor]:
        """Choose today's positions; return them and the outputs there, less their mean [P, C]."""
        x = seen.x
        places = C.sample_places(len(x), x.shape[2:].numel(), self.positions, history.step, x.device)
        return places, C.outputs_at(x, places).sub_(seen.today.mean)

    def _by_euler(self, seen: Observation, history: History) -> bool:
        """Whether `x` says what the weights make of the inputs: its own producer's, in one process, unrounded."""
        exact = seen.x.dtype == seen.today.mean.dtype and history.narrow is None
        return self.direct and exact and seen.today.local is None

    def _input(self, producer: Producer, seen: Observation) -> Tensor | None:
        """Return what the producer read, None for a branch of the sum that this step leaves out."""
        if not producer.has_run and any(other.has_run for other in self.producers):
            return None
        return producer.input_for(seen.x, seen.label)

    def _patches(self, producer: Producer, y: Tensor, places: C.Places, mean_grad: Tensor, seen: Observation) -> Tensor:
        patches = C.patches_at(y, producer.geometry, places, seen.x.shape[2:])
        return patches.sub_(mean_grad) if self.centres else patches


def total(tensors: list[Tensor]) -> Tensor:
    """Add tensors up."""
    return functools.reduce(torch.add, tensors)


def add_to(row: Rings, name: str, term: Tensor) -> None:
    """Add a term to what a row has under a name, if anything."""
    row[name] = row[name] + term if name in row else term
