"""What an experiment is: a module that lists its runs, does one of them, and turns the results into rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

from crossbn.lab.experiments.rows import Spread
from crossbn.lab.experiments.tasks import News, Result, Task, Values


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
    """What a module in this package has, to be one of `registry.EXPERIMENTS`.

    Attributes:
        TITLE: what the table or figure is.
        MEASURES: the columns of the table.
        ALONE: whether runs must have the machine to themselves, because they take times.
    """

    TITLE: str
    MEASURES: tuple[Measure, ...]
    ALONE: bool

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return the runs; None for as many seeds as the experiment is worth at this scale."""
        ...

    def estimate_seconds(self, task: Task) -> float:
        """Return about how long a run takes here."""
        ...

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if something that the runs need is missing."""
        ...

    def work(self, task: Task, watch: Callable[[News], None], folder: Path, /) -> Values:
        """Do a run, or go on with one that left something in the folder, which need not be there."""
        ...

    def rows(self, results: Sequence[Result]) -> list[Comparison]:
        """Return the rows of the table; runs of other tables may be among the results, runs may be missing."""
        ...

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are, how they differ from the paper's, and what they cannot tell: a sentence each."""
        ...
