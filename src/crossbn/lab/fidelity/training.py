"""Measuring during a training that is a function."""

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import TypeVar

from torch import nn

from crossbn.lab.fidelity.fidelity_records import FidelityRecord
from crossbn.lab.fidelity.probe import FidelityProbe

Batch = TypeVar("Batch")


def fidelity(
    model: nn.Module,
    batches: Iterable[Batch],
    train_step: Callable[[Batch], object],
    *,
    steps: int | None = None,
    every: int = 20,
    layers: Collection[str] | None = None,
) -> list[FidelityRecord]:
    """Train a converted model and measure on the way how close its remembered statistics are to the true ones.

    Args:
        model: converted; `train_step` calls it.
        batches: a loader, or anything that yields what `train_step` takes.
        train_step: does a training step: forward, backward, optimizer.
        steps: no more than this many; None for all batches.
        every: steps from one measurement to the next.
        layers: names of the norms to look at; None for all.

    Raises:
        ValueError: as `FidelityProbe` does.

    Example:
        >>> import crossbn
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        >>> report = crossbn.convert_(model, window=3)
        >>> records = fidelity(model, torch.randn(9, 4, 3), lambda batch: model(batch).sum().backward(), every=4)
        >>> sorted({(record.step, record.age) for record in records})
        [(4, 1), (4, 2), (8, 1), (8, 2)]
    """
    with FidelityProbe(model, every=every, layers=layers) as probe:
        for batch in islice(batches, steps):
            train_step(batch)
    return probe.records
