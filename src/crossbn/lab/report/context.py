"""What numbers were made with, in words."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from crossbn.lab.experiments.estimates import in_words


class Made(Protocol):
    """What a record says about how it was made."""

    @property
    def versions(self) -> Mapping[str, Any]:
        """Of the software, by name."""
        ...

    @property
    def machine(self) -> Mapping[str, Any]:
        """What it computes with."""
        ...


def distinct(facts: Iterable[Mapping[str, object]]) -> Iterable[str]:
    """Return each of the mappings once, in words.

    Example:
        >>> list(distinct([{"torch": "2.6", "python": "3.11"}, {"torch": "2.6", "python": "3.11"}]))
        ['torch 2.6, python 3.11']
    """
    return dict.fromkeys(", ".join(f"{name} {value}" for name, value in each.items()) for each in facts)


def surroundings(records: Sequence[Made]) -> dict[str, str]:
    """Return software, state of the source and machine of the records, by name; what no record tells is not there."""
    commits = dict.fromkeys(str(getattr(record, "commit", "")) for record in records)
    told = {
        "Software": "; ".join(distinct(record.versions for record in records)),
        "Commit": ", ".join(filter(None, commits)),
        "Machine": "; ".join(distinct(record.machine for record in records)),
    }
    return {name: value for name, value in told.items() if value}


def origin(name: str, records: int, seconds: float | None = None) -> dict[str, str]:
    """Return where records come from and how long they took, by name."""
    told = {"Records": f"{records} in {name}"}
    return told if seconds is None else {**told, "Computing time": in_words(seconds)}


def in_text(value: object) -> str:
    """Return a setting as people write it.

    Example:
        >>> [in_text(each) for each in (0.00625, None, True, {"order": 0, "layers": 1}, {}, (3, 64, 64))]
        ['0.00625', 'not set', 'yes', 'order 0, layers 1', 'not set', '3, 64, 64']
    """
    if value is None or value == {} or value == []:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {in_text(each)}" for name, each in value.items())
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
