"""`crossbn --version`."""

import torch

import crossbn
from crossbn.ops import library
from tests.cli.answers import call


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
