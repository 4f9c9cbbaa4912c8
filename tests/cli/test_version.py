"""`crossbn --version`."""

import torch
from typer.testing import CliRunner

import crossbn
from crossbn.cli import make_app
from crossbn.ops import library


def test_versions_and_compiled_code() -> None:
    done = CliRunner().invoke(make_app(), ["--version"])
    assert done.exit_code == 0
    first, second = done.stdout.splitlines()
    assert first.startswith(f"crossbn {crossbn.__version__}, torch {torch.__version__}, Python 3.")
    assert second == "On the CPU compiled code does a training step."


def test_missing_compiled_code_is_said() -> None:
    with library.switched_off():
        done = CliRunner().invoke(make_app(), ["--version"])
    assert done.exit_code == 0
    assert "torch's operators do a training step, slower" in done.stdout
    assert "with a C compiler" in done.stdout
