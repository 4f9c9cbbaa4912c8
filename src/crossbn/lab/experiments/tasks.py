"""What one run of an experiment is told and what came of it, as lines of JSON that a later call goes on from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from crossbn.lab.cost import surroundings
from crossbn.lab.experiments.cores import usable_cores
from crossbn.lab.records import MALFORMED, append_lines, read_lines

Values = Mapping[str, Any]
"""Whatever JSON can hold, by name."""


class News(NamedTuple):
    """Where a run stands."""

    share: float
    """How much of it is done, 0 to 1."""
    phrase: str
    """What is being done, or the latest number."""


@dataclass(frozen=True)
class Task:
    """What one run is told: equal tasks are the same work.

    Attributes:
        experiment: whose run it is.
        name: what it is called in tables; tasks of an experiment that share it differ in their seed only.
        seed: of everything random in it; where nothing is, the number of the repetition.
        settings: everything else, by name. No paths: the same work on another machine is the same task.
    """

    experiment: str
    name: str
    seed: int
    settings: Values

    @property
    def key(self) -> str:
        """A text that equal tasks share."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def folder_name(self) -> str:
        """A short name for the folder of what an unfinished run leaves; other software has another."""
        told = json.dumps([self.key, surroundings.versions()])
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def _machine() -> dict[str, str]:
    return {**surroundings.machine("cpu"), "cores": str(usable_cores())}


@dataclass(frozen=True)
class Result:
    """A finished run, and what it ran on.

    Attributes:
        task: what was asked for.
        values: what came out, by name.
        seconds: wall-clock time.
        versions: of the software, by name.
        machine: what it computes with.
        commit: state of the source; "" if it is not known.
    """

    task: Task
    values: Values
    seconds: float
    versions: Mapping[str, str] = field(default_factory=surroundings.versions)
    machine: Mapping[str, str] = field(default_factory=_machine)
    commit: str = field(default_factory=surroundings.commit)

    def answers(self, task: Task) -> bool:
        """Tell whether `task` need not be done again: this is of it, made with the software in use now.

        A commit alone makes nobody repeat a week of training; it is in the record, to judge by.
        """
        return self.task.key == task.key and self.versions == surroundings.versions()

    def to_json(self) -> str:
        """Return the result as one line; the task's fields stand beside the others."""
        own = asdict(self)
        return json.dumps({**own.pop("task"), **own})

    @classmethod
    def from_json(cls, line: str) -> "Result":
        """Return the result that `to_json` turned into `line`.

        Raises:
            ValueError: if the line is not JSON.
            KeyError: if it lacks a field.
            TypeError: if it is something else.
        """
        found = json.loads(line)
        told, own = ([each.name for each in fields(kind)] for kind in (Task, cls))
        task = Task(**{name: found[name] for name in told})
        return cls(task, **{name: found[name] for name in own if name != "task"})


def append_result(path: Path, result: Result) -> None:
    """Add a line to the file, which need not exist yet."""
    append_lines(path, [result])


def read_results(path: Path) -> list[Result]:
    """Return the results in a file, none if there is no such file.

    Raises:
        RecordError: if a line is not a result.
    """
    return read_lines(path, Result.from_json, "the result of a run")


def forget_results(path: Path, tasks: Sequence[Task]) -> None:
    """Take the results of `tasks`, and what is no result, out of a file; those of other tasks stay."""
    if not path.exists():
        return
    keys = {task.key for task in tasks}
    lines = path.read_bytes().splitlines(keepends=True)
    kept = path.with_suffix(".new")
    kept.write_bytes(b"".join(line for line in lines if _is_of_another(line, keys)))
    kept.replace(path)  # at once: an interruption leaves one of the two


def _is_of_another(line: bytes, keys: set[str]) -> bool:
    try:
        return Result.from_json(line.decode()).task.key not in keys
    except MALFORMED:
        return False


def by_name(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each name, in the order in which the names first come up."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.task.name, []).append(result)
    return groups
