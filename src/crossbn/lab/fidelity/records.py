"""How close remembered statistics are to the true ones, and why they differ: numbers, their averages, their record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from crossbn.lab import records as files
from crossbn.lab.records import Record

Key = TypeVar("Key")

SAME_LAYER = "same layer"
WHOLE_NETWORK = "whole network"
TRUTHS = (SAME_LAYER, WHOLE_NETWORK)

OWN_WEIGHTS, WEIGHTS_BEFORE, NORMS_BEFORE, ALL = "own weights", "weights before", "norms before", "all"
CAUSES = (OWN_WEIGHTS, WEIGHTS_BEFORE, NORMS_BEFORE)

_ROUNDING = 1e-5  # relative; of statistics in float32


@dataclass(frozen=True)
class Fidelity:
    """Errors of remembered moments, averaged over channels; see `comparison` for the formulas.

    Attributes:
        channels: how many, all that were averaged over.
        naive_mean_error: of the mean as it was remembered, in standard deviations.
        compensated_mean_error: of the mean moved to today's weights.
        naive_var_error: of the variance as it was remembered, relative to the true one of the window.
        compensated_var_error: of the variance moved to today's weights, clipped at 0.
        batch_noise: how far the variances of batches are from their average, on the same scale; None for one batch.
        invalid: share of the compensated variances that are negative, where the validity guard acts.
    """

    channels: int
    naive_mean_error: float
    compensated_mean_error: float
    naive_var_error: float
    compensated_var_error: float
    batch_noise: float | None
    invalid: float

    @property
    def explained_mean(self) -> float:
        """Share of the mean's true drift that the compensation explains; 0 if there is no drift."""
        return _explained(self.naive_mean_error, self.compensated_mean_error)

    @property
    def explained_var(self) -> float:
        """Share of the variance's true drift that the compensation explains; 0 if there is no drift."""
        return _explained(self.naive_var_error, self.compensated_var_error)

    @classmethod
    def average(cls, parts: Sequence[Fidelity]) -> Fidelity:
        """Return the average over the channels of all parts, so that shares become ratios of sums.

        Example:
            >>> few = Fidelity(1, 0.0, 0.0, 0.4, 0.2, 0.1, 0.0)
            >>> many = Fidelity(3, 0.0, 0.0, 0.8, 0.0, 0.1, 0.0)
            >>> round(Fidelity.average([few, many]).explained_var, 3)
            0.929
        """
        channels = sum(part.channels for part in parts)
        found: dict[str, float | None] = {}
        for name in (each.name for each in fields(cls)[1:]):
            values = [getattr(part, name) for part in parts]
            if None not in values:
                found[name] = sum(p.channels * value for p, value in zip(parts, values, strict=True)) / channels
            else:
                found[name] = None
        return cls(channels, **found)  # type: ignore[arg-type]  # the noise alone may be None


def _explained(naive: float, compensated: float) -> float:
    return 1 - compensated / naive if naive > _ROUNDING else 0.0


@dataclass(frozen=True)
class FidelityRecord:
    """What was found at one step, of one layer, for one age.

    Attributes:
        step: training steps before the measurement.
        layer: the norm; of a concatenation with its run of channels, "norm[0:64]".
        age: how many steps ago the statistics were remembered, from 1.
        truth: "same layer", the old input of the operator with today's weights, or "whole network", the old step
            done again with today's weights in all layers, every norm pooling what it pooled then.
        fidelity: the errors.
    """

    step: int
    layer: str
    age: int
    truth: str
    fidelity: Fidelity

    @classmethod
    def of(cls, record: Record) -> list[FidelityRecord]:
        """Return all that a run of `crossbn diagnose` has found.

        Raises:
            KeyError: if a field is missing.
        """
        if "fidelity" in record.values:
            rows = _rows(record.values["fidelity"], "truth")
        else:  # a line of its own for each, as they were written before
            rows = [{**record.settings, **record.values}]
        return [
            cls(
                **{name: row[name] for name in ("step", "layer", "age", "truth")},
                fidelity=Fidelity(**{each.name: row[each.name] for each in fields(Fidelity)}),
            )
            for row in rows
        ]


class CauseRecord(NamedTuple):
    """How much one cause moves the statistics of one age, averaged over the channels of a layer.

    The mean is in standard deviations, the variance relative to itself, both of all remembered batches run together.
    """

    step: int
    layer: str
    age: int
    cause: str
    channels: int
    mean_error: float
    var_error: float

    @classmethod
    def of(cls, record: Record) -> list[CauseRecord]:
        """Return the causes that a run of `crossbn diagnose` has found."""
        return [cls(**row) for row in _rows(record.values.get("causes", {}), "cause")]


def found_values(
    records: Iterable[FidelityRecord], causes: Iterable[CauseRecord], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of a run's record: a list of each number by layer and truth, and by layer and cause."""
    errors = [asdict(record) for record in records]
    return {
        "fidelity": _nest([{**row.pop("fidelity"), **row} for row in errors], "truth"),
        "causes": _nest([cause._asdict() for cause in causes], "cause"),
        "left_out": dict(left_out),
    }


def _nest(rows: Iterable[dict[str, Any]], kind: str) -> dict[str, dict[str, dict[str, list[Any]]]]:
    found: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for row in rows:
        columns = found.setdefault(row.pop("layer"), {}).setdefault(row.pop(kind), {})
        for name, value in row.items():
            columns.setdefault(name, []).append(float(f"{value:.5g}") if isinstance(value, float) else value)
    return found


def _rows(nested: Mapping[str, Mapping[str, Mapping[str, Sequence[Any]]]], kind: str) -> list[dict[str, Any]]:
    return [
        {"layer": layer, kind: one, **dict(zip(columns, values, strict=True))}
        for layer, kinds in nested.items()
        for one, columns in kinds.items()
        for values in zip(*columns.values(), strict=True)
    ]


def read(path: Path) -> list[FidelityRecord]:
    """Return all that the runs of a file have found, nothing if there is no such file.

    Raises:
        RecordError: if a line is not a record.
    """
    return [found for record in files.read(path) for found in FidelityRecord.of(record)]


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
    return dict(sorted(average_by(records, lambda record: record.age).items()))


def by_layer(records: Iterable[FidelityRecord]) -> dict[str, Averages]:
    """Return the averages for each layer, in the order of the network."""
    return average_by(records, lambda record: record.layer)


def by_progress(records: Sequence[FidelityRecord], parts: int | None = None) -> dict[int, Averages]:
    """Return the averages by step, or for `parts` equal parts of the measurements by the first step of each."""
    steps = sorted({record.step for record in records})
    first = {step: part[0] for part in _cut(steps, parts or len(steps)) for step in part}
    return dict(sorted(average_by(records, lambda record: first[record.step]).items()))


def average_causes(
    records: Sequence[CauseRecord], parts: int | None = None
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the errors of mean and variance by layer and cause, averaged over steps and ages.

    With `parts`, neighbouring layers are averaged, so that there are so many: errors by depth.
    """
    layers = list(dict.fromkeys(record.layer for record in records))
    names = {layer: layer for layer in layers}
    if parts is not None:
        for part in _cut(layers, parts):
            name = part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}"
            names |= dict.fromkeys(part, name)
    errors: dict[tuple[str, str], list[CauseRecord]] = {}
    for record in records:
        errors.setdefault((names[record.layer], record.cause), []).append(record)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for (name, cause), those in errors.items():
        pairs = sum(each.mean_error for each in those), sum(each.var_error for each in those)
        found.setdefault(name, {})[cause] = pairs[0] / len(those), pairs[1] / len(those)
    return found


def _cut(values: Sequence[Key], parts: int) -> list[Sequence[Key]]:
    """Return so many parts of about the same length, at most one for each value."""
    count = min(parts, len(values))
    ends = [-(-i * len(values) // count) for i in range(count + 1)] if count else []
    return [values[start:end] for start, end in pairwise(ends)]
