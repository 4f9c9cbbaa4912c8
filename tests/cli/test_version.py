"""`crossbn --version`."""

import os
import sys
from pathlib import Path

import torch

import crossbn
from crossbn.ops import library
from tests.cli.answers import call
from tests.support import run_python


def test_versions_and_compiled_code() -> None:
    done = call("--version")
    assert done.status == 0
    first, second = done.output.splitlines()
    assert first.startswith(f"crossbn {crossbn.__version__}, torch {torch.__version__}, Python 3.")
    assert second == "On the CPU compiled code does a training step."


def test_missing_compiled_code_is_said() -> None:
    with library.switched_off():
        done = call("--version")
    assert done.status == 0
    assert "torch's operators do a training step, slower" in done.output
    assert "with a C compiler" in done.output


def test_it_needs_torch_alone(tmp_path: Path) -> None:
    for package in ("click", "rich", "typer"):
        (tmp_path / f"{package}.py").write_text("raise ImportError")
    code = "import sys; from crossbn.cli import main; sys.argv = ['crossbn', '--version']; main()"
    printed = run_python("-c", code, variables={"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))})
    assert printed == call("--version").output
