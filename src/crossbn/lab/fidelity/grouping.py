"""Averages of records: by age, by layer, by progress of the training."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from crossbn.lab.fidelity.fidelity_records import Fidelity, FidelityRecord

Key = TypeVar("Key")

Averages = dict[str, Fidelity]
"""By truth: "same layer", "whole network"."""


def average_by(records: Iterable[FidelityRecord], key: Callable[[FidelityRecord], Key]) -> dict[Key, Averages]:
    """Return the averages over all records that have the same key, in the order of appearance.

    Example:
        >>> errors = [Fidelity(1, 0.0, 0.0, naive, 0.1, 0.2, 0.0) for naive in (0.4, 0.6)]
        >>> records = [FidelityRecord(step, "1", 1, "same layer", e) for step, e in enumerate(errors)]
        >>> average_by(records, lambda record: record.age)[1]["same layer"].naive_var_error
        0.5
    """
    parts: dict[Key, dict[str, list[Fidelity]]] = {}
    for record in records:
        parts.setdefault(key(record), {}).setdefault(record.truth, []).append(record.fidelity)
    return {k: {truth: Fidelity.average(found) for truth, found in kinds.items()} for k, kinds in parts.items()}


def by_age(records: Iterable[FidelityRecord]) -> dict[int, Averages]:
    """Return the averages for each age, the latest first."""
    return _sorted(average_by(records, lambda record: record.age))


def by_layer(records: Iterable[FidelityRecord]) -> dict[str, Averages]:
    """Return the averages for each layer, in the order of the network."""
    return average_by(records, lambda record: record.layer)


def by_progress(records: Sequence[FidelityRecord], parts: int | None = None) -> dict[int, Averages]:
    """Return the averages by step, or for `parts` equal parts of the measurements by the first step of each."""
    steps = sorted({record.step for record in records})
    pieces = len(steps) if parts is None else min(parts, len(steps))
    first = {step: steps[-(-(i * pieces // len(steps)) * len(steps) // pieces)] for i, step in enumerate(steps)}
    return _sorted(average_by(records, lambda record: first[record.step]))


def _sorted(found: dict[Any, Averages]) -> dict[Any, Averages]:
    return dict(sorted(found.items()))
