"""Accuracies of classification runs as rows of a table, with what the seeds can tell of their differences."""

from collections.abc import Mapping, Sequence

from crossbn.experiments.cells import Cell
from crossbn.experiments.experiment import Comparison, Measure
from crossbn.experiments.rows import Spread, exceeds_noise
from crossbn.experiments.tasks import Result, by_name

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
    reference = accuracy_of(results, cells[against])
    rows = []
    for label, cell in cells.items():
        runs = found.get(cell.name, [])
        accuracy = accuracy_of(results, cell)
        if accuracy is None:
            continue
        ours = {
            "accuracy": accuracy,
            "training": Spread.of([100 * result.values["curve"][-1]["train_accuracy"] for result in runs]),
            "milliseconds": Spread.of([1000 * result.values["seconds_per_step"] for result in runs]),
        }
        others = {} if cell.name == cells[against].name else {against: reference}
        known = {"accuracy": paper[label]} if paper and label in paper else {}
        rows.append(Comparison(label, ours, known, describe_differences(accuracy, others, len(runs))))
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
        found = {column: accuracy_of(results, cell) for column, cell in cells.items()}
        ours = {column: accuracy for column, accuracy in found.items() if accuracy is not None}
        if not ours:
            continue
        own = cells.get(subject)
        others = {column: each for column, each in ours.items() if own is None or cells[column].name != own.name}
        seeds = 0 if own is None else len(by_name(results).get(own.name, []))
        rows.append(Comparison(label, ours, {}, describe_differences(ours.get(subject), others, seeds)))
    return rows


def accuracy_of(results: Sequence[Result], cell: Cell) -> Spread | None:
    """Return the test accuracy of a cell at the end of training, in percent over the seeds; None if it was not run."""
    found = by_name(results).get(cell.name)
    return None if found is None else Spread.of([100 * result.values["accuracy"] for result in found])


def describe_differences(ours: Spread | None, others: Mapping[str, Spread | None], seeds: int) -> str:
    """Say how far a mean is from others, with a question mark where that may be chance.

    Example:
        >>> others = {"BN": Spread(44.0, 0.5), "GN": Spread(48.4, 0.5), "LN": None}
        >>> describe_differences(Spread(48.0, 0.5), others, 3)
        '+4.0 to BN, -0.4 to GN (?)'
    """
    if ours is None:
        return ""
    parts = []
    for name, other in others.items():
        if other is not None:
            doubt = "" if exceeds_noise(ours, other, seeds) else " (?)"
            parts.append(f"{ours.mean - other.mean:+.1f} to {name}{doubt}")
    return ", ".join(parts)
