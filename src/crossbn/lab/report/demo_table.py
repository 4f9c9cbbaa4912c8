"""The demo's rows as text, for the terminal and the page alike."""

from collections.abc import Sequence

from crossbn.lab.experiments.rows import Row, Spread
from crossbn.lab.report.table import Table

COLUMNS = ("norm", "window", "seeds", "mean ± sd, %", "seconds")


def demo_table(rows: Sequence[Row]) -> Table:
    """Return a row for each norm and batch size."""
    return Table("", COLUMNS, tuple(cells(row) for row in rows))


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, column by column."""
    window = str(row.window) if row.norm == "cbn" else ""
    return (row.name, window, str(row.seeds), percent(row.accuracy), f"{row.seconds:.1f}")


def percent(spread: Spread) -> str:
    """Return mean and, if there is one, standard deviation in percent.

    Example:
        >>> percent(Spread(0.93751, 0.004)), percent(Spread(0.5, None))
        ('93.8 ± 0.4', '50.0')
    """
    mean = f"{100 * spread.mean:.1f}"
    return mean if spread.sd is None else f"{mean} ± {100 * spread.sd:.1f}"


def caption(rows: Sequence[Row]) -> str:
    """Say what the columns are."""
    return (
        f"Accuracy on {rows[0].test_images} test images at the end of training: mean and standard deviation (sd) over "
        "the seeds. Seconds are wall-clock time of one run on one core, others beside it."
    )
