"""What an experiment is: it lists its runs, does one of them, and turns the records of many into rows of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from crossbn.lab.progress import Watch
from crossbn.lab.records import Record, Task
from crossbn.lab.statistics import Spread

Values = Mapping[str, Any]
"""Whatever JSON can hold, by name."""


class Scale(str, Enum):
    """How much is computed."""

    SMALL = "small"
    """What two cores can do in an hour or so: shows the effect, not the paper's numbers."""
    MEDIUM = "medium"
    """What two cores can do in some hours, of the tables that are worth it: a training that has come further."""
    FULL = "full"
    """What the paper did."""


class UnavailableError(Exception):
    """Something that the runs need is not there; the message says what and where it is looked for."""


class Measure(NamedTuple):
    """A column of a table."""

    name: str
    """Of the values in a row."""
    label: str
    """Over the column, with its unit."""
    form: str = ".2f"
    """How a number is written, in Python's format language."""


@dataclass(frozen=True)
class Comparison:
    """A row of a table: our numbers, and the paper's where it has one.

    Attributes:
        name: of the row.
        ours: by the name of the measure, over the seeds.
        paper: by the name of the measure.
        remark: how the row compares with others, in a few words.
    """

    name: str
    ours: Mapping[str, Spread]
    paper: Mapping[str, float] = field(default_factory=dict)
    remark: str = ""


class Experiment(Protocol):
    """What an entry of `EXPERIMENTS` has: a specification, or a module's object that differs in kind.

    Attributes:
        title: what the table or figure is.
        measures: the columns of the table.
        scales: that there are of it.
        alone: whether runs must have the machine to themselves, because they take times.
    """

    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def measures(self) -> tuple[Measure, ...]: ...  # noqa: D102
    @property
    def scales(self) -> tuple[Scale, ...]: ...  # noqa: D102
    @property
    def alone(self) -> bool: ...  # noqa: D102

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return the runs; None for as many seeds as the experiment is worth at this scale."""
        ...

    def estimate_seconds(self, task: Task) -> float:
        """Return about how long a run takes here."""
        ...

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if something that the runs need is missing."""
        ...

    def work(self, task: Task, watch: Watch, folder: Path | None = None, /) -> Values:
        """Do a run, or go on with one that left something in the folder, which need not be there."""
        ...

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return the rows of the table; runs of other tables may be among the records, runs may be missing."""
        ...

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are, how they differ from the paper's, and what they cannot tell: a sentence each."""
        ...
