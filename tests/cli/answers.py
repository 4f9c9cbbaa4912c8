"""What the command answers."""

from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from crossbn.cli import make_app


class Answer(NamedTuple):
    """A command's exit status, and what it wrote."""

    status: int
    output: str
    errors: str


def call(*words: str | Path, columns: int = 200) -> Answer:
    """Run `crossbn` with these words in a terminal of that width."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(make_app(), [str(word) for word in words])
    return Answer(result.exit_code, result.stdout, result.stderr)
