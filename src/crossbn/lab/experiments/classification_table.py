"""Tables of classifiers: rows that are trainings, or rows and columns of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossbn.lab.experiments import classification, paper
from crossbn.lab.experiments.cells import Cell
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.table import Specification, list_rows
from crossbn.lab.records import Record, Task, by_name
from crossbn.lab.statistics import Spread, describe_differences

MEASURES = (
    Measure("accuracy", "accuracy, %", ".1f"),
    Measure("training", "training, %", ".1f"),
    Measure("milliseconds", "ms / step", ",.1f"),
)
"""The columns of a table whose rows are trainings."""
Cells = Mapping[str, Cell]
"""By what they are called in a table."""
Grid = Mapping[str, Cells]
"""By row, then by column; rows may lack columns."""


@dataclass(frozen=True)
class Table(Specification):
    """A table of trained classifiers."""

    kind = classification.KIND
    # Functions of a module, so that another process can find them.
    estimate_seconds = staticmethod(classification.estimate_seconds)
    check = staticmethod(classification.check)
    work = staticmethod(classification.work)

    def grid(self, scale: Scale) -> Grid:
        """Return the cells by row and column; a row that is one training has the column ""."""
        return {row: {"": each} if isinstance(each, Cell) else each for row, each in self.cells(scale).items()}

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Accuracies in training and testing and time if rows are trainings, else the columns of all scales."""
        rows = [row for scale in self.scales for row in self.grid(scale).values()]
        columns = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
        return MEASURES if "" in columns else tuple(Measure(name, f"{name}, %", ".1f") for name in columns)

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return the trainings."""
        count = seeds or (1 if scale is Scale.FULL else self.seeds)
        return classification.make_tasks(self._all_cells(scale), scale, count)

    def _all_cells(self, scale: Scale) -> list[Cell]:
        return [cell for row in self.grid(scale).values() for cell in row.values()]

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return the rows that have runs."""
        grid, known = self.grid(classification.scale_of(records)), paper.numbers(self.name)
        if any("" in row for row in grid.values()):
            names = {label: row[""].name for label, row in grid.items()}
            return list_rows(records, _numbers, names=names, measure="accuracy", against=self.against, known=known)
        return grid_rows(records, grid, self.against, known)


def grid_rows(records: Sequence[Record], grid: Grid, subject: str, known: paper.Rows) -> list[Comparison]:
    """Return a row for each of the grid's with a run: test accuracies at the end, by column.

    Args:
        records: of these cells and of any others.
        grid: of cells.
        subject: the column that is compared with the others of its row.
        known: the paper's numbers.
    """
    rows = []
    for label, cells in grid.items():
        found = {column: accuracies_of(records, cell) for column, cell in cells.items()}
        ours = {column: Spread.of([*values.values()]) for column, values in found.items() if values}
        if ours:
            own = cells.get(subject)
            others = {column: each for column, each in found.items() if own is None or cells[column].name != own.name}
            remark = describe_differences(found.get(subject, {}), others)
            rows.append(Comparison(label, ours, known.get(label, {}), remark))
    return rows


def accuracies_of(records: Sequence[Record], cell: Cell) -> dict[int, float]:
    """Return the test accuracies of a cell at the end of training, in percent by seed; none if it was not run."""
    return {record.seed: 100 * record.values["accuracy"] for record in by_name(records).get(cell.name, [])}


def _numbers(record: Record) -> dict[str, float | None]:
    values: Any = record.values
    return {
        "accuracy": 100 * values["accuracy"],
        "training": 100 * values["curve"][-1]["train_accuracy"],
        "milliseconds": 1000 * values["seconds_per_step"],
    }
