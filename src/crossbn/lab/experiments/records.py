"""What a training was told and what came of it, as lines of JSON."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

import crossbn
from crossbn.lab.experiments.cores import usable_cores
from crossbn.lab.records import append_lines, read_lines


class Point(NamedTuple):
    """A measurement during training."""

    epoch: float
    """Passes over the training images so far."""
    accuracy: float
    """The share of the test images that are classified correctly, 0 to 1."""


@dataclass(frozen=True)
class Run:
    """What one training is told: equal runs are the same work.

    Attributes:
        experiment: whose run it is.
        name: what it is called in tables; runs that share it differ in their seed only.
        norm: "bn", "gn" or "cbn".
        batch_size: images per step.
        window: steps whose statistics are pooled; 1 for norms that know one step only.
        seed: of the initial weights and of the order of the images.
        settings: everything else, by name.
    """

    experiment: str
    name: str
    norm: str
    batch_size: int
    window: int
    seed: int
    settings: Mapping[str, float]


def _versions() -> dict[str, str]:
    return {"crossbn": crossbn.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _machine() -> dict[str, int | str]:
    return {"cores": usable_cores(), "processor": platform.machine()}


@dataclass(frozen=True)
class Record:
    """A finished run, and what it ran on.

    Attributes:
        run: what was asked for.
        curve: test accuracy during training; the last point is the result.
        test_images: how many images the accuracy is a share of.
        seconds: wall-clock time of the training, tests on the way included.
        versions: of the software, by name.
        machine: the cores and their kind.
    """

    run: Run
    curve: tuple[Point, ...]
    test_images: int
    seconds: float
    versions: Mapping[str, str] = field(default_factory=_versions)
    machine: Mapping[str, int | str] = field(default_factory=_machine)

    @property
    def accuracy(self) -> float:
        """Test accuracy at the end, 0 to 1."""
        return self.curve[-1].accuracy

    def answers(self, run: Run) -> bool:
        """Tell whether `run` need not be done again: this is its record, made by the software in use now."""
        return self.run == run and self.versions == _versions()

    def to_json(self) -> str:
        """Return the record as one line; the run's fields stand beside the others."""
        fields = asdict(self)
        return json.dumps({**fields.pop("run"), "accuracy": self.accuracy, **fields})

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Return the record that `to_json` turned into `line`.

        Raises:
            ValueError: if the line is not JSON.
            KeyError: if it lacks a field.
        """
        fields = json.loads(line)
        run = Run(**{name: fields[name] for name in Run.__dataclass_fields__})
        curve = tuple(Point(*point) for point in fields["curve"])
        rest = {name: fields[name] for name in ("test_images", "seconds", "versions", "machine")}
        return cls(run, curve, **rest)


def append_record(path: Path, record: Record) -> None:
    """Add a line to the file, which need not exist yet."""
    append_lines(path, [record])


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, none if there is no such file.

    Raises:
        RecordError: if a line is not a record.
    """
    return read_lines(path, Record.from_json, "a record")
