"""Rows as text, for the terminal and the page alike."""

from collections.abc import Sequence

from crossbn.experiments.rows import Row, Spread

COLUMNS = ("norm", "window", "seeds", "mean, %", "sd, %", "test images", "seconds")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, column by column."""
    mean, sd = percent(row.accuracy)
    return (row.name, str(row.window), str(row.seeds), mean, sd, str(row.test_images), f"{row.seconds:.1f}")


def percent(spread: Spread) -> tuple[str, str]:
    """Return mean and standard deviation in percent.

    Example:
        >>> percent(Spread(0.93751, None))
        ('93.8', '-')
    """
    return f"{100 * spread.mean:.1f}", "-" if spread.sd is None else f"{100 * spread.sd:.1f}"


def caption(rows: Sequence[Row]) -> str:
    """Say what the columns are."""
    return (
        f"Accuracy on {rows[0].test_images} test images at the end of training: mean and standard deviation (sd) over "
        f"the seeds. Seconds are wall-clock time of one run on one core, others beside it."
    )
