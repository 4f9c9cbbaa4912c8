"""What runs have in common and where they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from crossbn.lab.report.context import headline, in_text
from crossbn.lab.report.table import Table

Settings = Mapping[str, Any]


def common(runs: Sequence[Settings]) -> dict[str, str]:
    """Return the settings that all runs share, as text.

    Example:
        >>> common([{"learning_rate": 0.1, "window": 2}, {"learning_rate": 0.1, "window": 8}])
        {'Learning rate': '0.1'}
    """
    differing = names_that_differ(runs)
    return {headline(name): in_text(value) for name, value in runs[0].items() if name not in differing}


def names_that_differ(runs: Sequence[Settings]) -> list[str]:
    """Return the names whose values are not the same in all runs, in the order in which they first come up."""
    names = dict.fromkeys(name for run in runs for name in run)
    absent = object()
    return [name for name in names if any(run.get(name, absent) != runs[0].get(name, absent) for run in runs)]


def settings_table(runs: Mapping[str, Settings]) -> Table | None:
    """Return the settings in which runs differ, a row for each run by its name; None if there is nothing to say."""
    names = names_that_differ(list(runs.values()))
    if not names:
        return None
    rows = [(run, *(in_text(found[name]) if name in found else "" for name in names)) for run, found in runs.items()]
    return Table("Where the runs differ", ("run", *(name.replace("_", " ") for name in names)), tuple(rows))
