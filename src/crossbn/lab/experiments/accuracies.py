"""Accuracies of classification runs as rows of a table, with what the seeds can tell of their differences."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from crossbn.lab.experiments.cells import Cell
from crossbn.lab.experiments.experiment import Comparison, Measure
from crossbn.lab.experiments.rows import Spread, is_beyond_chance
from crossbn.lab.experiments.tasks import Result, by_name

MEASURES: tuple[Measure, ...] = (
    Measure("accuracy", "accuracy, %", ".1f"),
    Measure("training", "training, %", ".1f"),
    Measure("milliseconds", "ms / step", ",.1f"),
)
"""The columns of a table whose rows are trainings, see `list_rows`."""
Cells = Mapping[str, Cell]
"""By what they are called in a table."""


def list_rows(
    results: Sequence[Result], cells: Cells, against: str, paper: Mapping[str, float] | None = None
) -> list[Comparison]:
    """Return a row for each cell that was run: accuracy in testing and in training at the end, and time.

    Args:
        results: of these cells and of any others.
        cells: in the order of the rows.
        against: the row that the others are compared with.
        paper: the paper's accuracies, by row.
    """
    found = by_name(results)
    reference = accuracies_of(results, cells[against])
    rows = []
    for label, cell in cells.items():
        runs = found.get(cell.name, [])
        accuracies = accuracies_of(results, cell)
        if not accuracies:
            continue
        ours = {
            "accuracy": Spread.of([*accuracies.values()]),
            "training": Spread.of([100 * result.values["curve"][-1]["train_accuracy"] for result in runs]),
            "milliseconds": Spread.of([1000 * result.values["seconds_per_step"] for result in runs]),
        }
        others = {} if cell.name == cells[against].name else {against: reference}
        known = {"accuracy": paper[label]} if paper and label in paper else {}
        rows.append(Comparison(label, ours, known, describe_differences(accuracies, others)))
    return rows


def grid_rows(results: Sequence[Result], grid: Mapping[str, Cells], subject: str) -> list[Comparison]:
    """Return a row for each of the grid's with a run: test accuracies at the end, by column.

    Args:
        results: of these cells and of any others.
        grid: by row, then by column; rows may lack columns.
        subject: the column that is compared with the others of its row.
    """
    rows = []
    for label, cells in grid.items():
        found = {column: accuracies_of(results, cell) for column, cell in cells.items()}
        ours = {column: Spread.of([*values.values()]) for column, values in found.items() if values}
        if not ours:
            continue
        own = cells.get(subject)
        others = {column: each for column, each in found.items() if own is None or cells[column].name != own.name}
        rows.append(Comparison(label, ours, {}, describe_differences(found.get(subject, {}), others)))
    return rows


Accuracies = Mapping[int, float]
"""In percent, by seed."""


def accuracies_of(results: Sequence[Result], cell: Cell) -> Accuracies:
    """Return the test accuracies of a cell at the end of training; none if it was not run."""
    return {result.task.seed: 100 * result.values["accuracy"] for result in by_name(results).get(cell.name, [])}


def describe_differences(ours: Accuracies, others: Mapping[str, Accuracies]) -> str:
    """Say how far a mean is from others, seed by seed, with a question mark where that may be chance.

    Example:
        >>> ours, bn, gn = {0: 47.0, 1: 49.0}, {0: 43.0, 1: 45.2}, {0: 48.0, 1: 48.8}
        >>> describe_differences(ours, {"BN": bn, "GN": gn, "LN": {}})
        '+3.9 to BN, -0.4 to GN (?)'
    """
    parts = []
    for name, other in others.items():
        if differences := [value - other[seed] for seed, value in ours.items() if seed in other]:
            doubt = "" if is_beyond_chance(differences) else " (?)"
            parts.append(f"{fmean(differences):+.1f} to {name}{doubt}")
    return ", ".join(parts)
