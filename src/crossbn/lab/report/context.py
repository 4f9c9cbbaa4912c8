"""What runs were told and what they were made with, in words."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbn.lab.experiments.estimates import in_words
from crossbn.lab.records import Record
from crossbn.lab.report.table import Table

Settings = Mapping[str, Any]


def distinct(facts: Iterable[Mapping[str, object]]) -> Iterable[str]:
    """Return each of the mappings once, in words.

    Example:
        >>> list(distinct([{"torch": "2.6", "python": "3.11"}, {"torch": "2.6", "python": "3.11"}]))
        ['torch 2.6, python 3.11']
    """
    return dict.fromkeys(", ".join(f"{name} {value}" for name, value in each.items()) for each in facts)


def describe_origin(records: Sequence[Record], name: str) -> dict[str, str]:
    """Return software, state of the source, machine, file and computing time, by name, where records tell them.

    Args:
        records: with the environment that they were made in.
        name: of the file that they are from.
    """
    made = [record.environment for record in records]
    seconds = sum(record.values.get("seconds", 0.0) for record in records)
    told = {
        "Software": "; ".join(distinct(each.get("versions", {}) for each in made)),
        "Commit": ", ".join(dict.fromkeys(str(each["commit"]) for each in made if each.get("commit"))),
        "Machine": "; ".join(distinct(each.get("machine", {}) for each in made)),
        "Records": f"{len(records)} in {name}",
        "Computing time": in_words(seconds) if seconds else "",
    }
    return {name: value for name, value in told.items() if value}


def in_text(value: object) -> str:
    """Return a setting as people write it; "" where it is not set.

    Example:
        >>> [in_text(each) for each in (0.00625, None, True, {"order": 0, "layers": 1}, {}, (3, 64, 64))]
        ['0.00625', '', 'yes', 'order 0, layers 1', '', '3, 64, 64']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        # An option that is there was chosen: of `positions`, the only one that may be None, that is all of them.
        return ", ".join(f"{name} {in_text(each) or 'all'}" for name, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(in_text(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def headline(name: str) -> str:
    """Return the name of a setting as a headline.

    Example:
        >>> headline("learning_rate")
        'Learning rate'
    """
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def common(runs: Sequence[Settings]) -> dict[str, str]:
    """Return the settings that all runs share and that are set, as text.

    Example:
        >>> common([{"learning_rate": 0.1, "window": 2, "head": None}, {"learning_rate": 0.1, "window": 8}])
        {'Learning rate': '0.1'}
    """
    differing = names_that_differ(runs)
    told = {headline(name): in_text(value) for name, value in runs[0].items() if name not in differing}
    return {name: value for name, value in told.items() if value}


def names_that_differ(runs: Sequence[Settings]) -> list[str]:
    """Return the names whose values are not the same in all runs, in the order in which they first come up."""
    names = dict.fromkeys(name for run in runs for name in run)
    return [name for name in names if any(run.get(name) != runs[0].get(name) for run in runs)]


def settings_tables(runs: Mapping[str, Settings]) -> list[Table]:
    """Return the settings in which runs differ, a row for each run by its name; no table if there is nothing to say."""
    names = names_that_differ(list(runs.values()))
    if not names:
        return []
    rows = [(run, *(in_text(found.get(name)) for name in names)) for run, found in runs.items()]
    return [Table("Where the runs differ", ("run", *(name.replace("_", " ") for name in names)), tuple(rows))]


def span(values: Iterable[int]) -> str:
    """Return a number, or the lowest and the highest of several.

    Example:
        >>> span([3, 5, 4]), span([2, 2])
        ('3 to 5', '2')
    """
    found = sorted(set(values))
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"


def shown_path(path: Path) -> str:
    """Return a path as a command on another machine may have it: of an absolute one, its last part.

    Example:
        >>> shown_path(Path("/home/me/runs")), shown_path(Path("runs/first"))
        ('runs', 'runs/first')
    """
    return path.name if path.is_absolute() else path.as_posix()
