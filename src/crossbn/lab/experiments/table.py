"""A table as a specification: which trainings stand in it, what is compared with what, what is said of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from crossbn.lab.experiments import paper
from crossbn.lab.experiments.experiment import Comparison, Scale
from crossbn.lab.experiments.notes import notes_of
from crossbn.lab.records import Record, by_name
from crossbn.lab.statistics import CHANCE, Spread, describe_differences
from crossbn.schedules import window_for

Numbers = Callable[[Record], Mapping[str, float | None]]
"""Returns what a table shows of a record, by the name of the measure."""


@dataclass(frozen=True)
class Specification:
    """What all tables of trainings have; see `experiment.Experiment` for what it is to others.

    Attributes:
        name: that `crossbn reproduce` takes, and that its paragraphs in `notes.md` and the paper's numbers have.
        title: what the table is.
        cells: returns the trainings of a scale by row, or by row and column.
        against: the row that the others are compared with, or the column that is compared with the others.
        seeds: of each training at small and medium scale; at full scale it is one.
        scales: that there are of it.
        alone: whether a run takes several cores.
        kind: of the records; what is said of all tables of the kind is in `notes.md`, too.
    """

    name: str
    title: str
    cells: Callable[[Scale], Mapping[str, Any]]
    against: str
    seeds: int = 3
    scales: tuple[Scale, ...] = (Scale.SMALL, Scale.FULL)
    alone: bool = False
    kind: ClassVar[str]

    def notes(self, scale: Scale) -> list[str]:
        """Say how it was done, what the numbers are, how they are compared, and what the paper has."""
        size = batch_size_of(scale)
        own = notes_of(self.name, scale, size=size, window=window_for(size))
        settings = notes_of(f"{self.name} settings", scale) or notes_of(f"{self.kind} settings", scale)
        return [*settings, *notes_of(self.kind, scale), CHANCE, *own, paper.about(self.name)]


def batch_size_of(scale: Scale) -> int:
    """Return where norms are compared in everything but the batch size."""
    return 4 if scale is Scale.FULL else 2


def pool(records: Sequence[Record], numbers: Numbers) -> dict[str, Spread]:
    """Return the numbers of records that differ in their seed only."""
    found = [numbers(record) for record in records]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: Spread.of([each[name] for each in found if name in each]) for name in names}


def list_rows(
    records: Sequence[Record],
    numbers: Numbers,
    *,
    names: Mapping[str, str] | None = None,
    measure: str = "",
    against: str = "",
    known: paper.Rows | None = None,
) -> list[Comparison]:
    """Return a row for each name that has records.

    Args:
        records: of these names and of any others.
        numbers: of a record.
        names: of the records, by row; None for a row for each name that there is.
        measure: what rows are compared by.
        against: the row that the others are compared with; none if there is none of that name.
        known: the paper's numbers.
    """
    groups = by_name(records)
    names = {name: name for name in groups} if names is None else names

    def by_seed(name: str) -> dict[int, float]:
        found = {record.seed: numbers(record).get(measure) for record in groups.get(name, [])}
        return {seed: value for seed, value in found.items() if value is not None}

    reference = names.get(against)
    rows = []
    for label, name in names.items():
        if name in groups:
            others = {} if reference in (None, name) else {against: by_seed(str(reference))}
            remark = describe_differences(by_seed(name), others)
            rows.append(Comparison(label, pool(groups[name], numbers), (known or {}).get(label, {}), remark))
    return rows
