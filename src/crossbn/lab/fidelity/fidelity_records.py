"""How close remembered statistics are to the true ones: numbers, and records of them as lines of JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from crossbn.lab.records import append_lines, read_lines

SAME_LAYER = "same layer"
WHOLE_NETWORK = "whole network"
TRUTHS = (SAME_LAYER, WHOLE_NETWORK)

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
    def average(cls, parts: Sequence["Fidelity"]) -> "Fidelity":
        """Return the average over the channels of all parts, so that shares become ratios of sums.

        Example:
            >>> few = Fidelity(1, 0.0, 0.0, 0.4, 0.2, 0.1, 0.0)
            >>> many = Fidelity(3, 0.0, 0.0, 0.8, 0.0, 0.1, 0.0)
            >>> round(Fidelity.average([few, many]).explained_var, 3)
            0.929
        """
        channels = sum(part.channels for part in parts)

        def mean(values: Iterable[float]) -> float:
            return sum(part.channels * value for part, value in zip(parts, values, strict=True)) / channels

        noises = [part.batch_noise for part in parts if part.batch_noise is not None]
        return cls(
            channels,
            mean(part.naive_mean_error for part in parts),
            mean(part.compensated_mean_error for part in parts),
            mean(part.naive_var_error for part in parts),
            mean(part.compensated_var_error for part in parts),
            mean(noises) if len(noises) == len(parts) else None,
            mean(part.invalid for part in parts),
        )


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

    def to_json(self) -> str:
        """Return the record as one line; the errors stand beside the other fields."""
        own, found = asdict(self), self.fidelity
        errors = own.pop("fidelity")
        return json.dumps(own | errors | {"explained_mean": found.explained_mean, "explained_var": found.explained_var})

    @classmethod
    def from_json(cls, line: str) -> "FidelityRecord":
        """Return the record that `to_json` turned into `line`.

        Raises:
            ValueError: if the line is not JSON.
            KeyError: if it lacks a field.
            TypeError: if it is no object.
        """
        found = json.loads(line)
        errors = Fidelity(**{each.name: found[each.name] for each in fields(Fidelity)})
        own = {each.name: found[each.name] for each in fields(cls) if each.name != "fidelity"}
        return cls(**own, fidelity=errors)


def append_records(path: Path, records: Iterable[FidelityRecord]) -> None:
    """Add lines to the file, which need not exist yet."""
    append_lines(path, records)


def read_records(path: Path) -> list[FidelityRecord]:
    """Return the records of a file, none if there is no such file.

    Raises:
        RecordError: if a line is not a record.
    """
    return read_lines(path, FidelityRecord.from_json, "a record of fidelity")
