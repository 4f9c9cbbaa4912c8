"""The code in docstrings and in the README runs and prints what it says."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import crossbn

MODULES = [
    info.name
    for info in pkgutil.walk_packages(crossbn.__path__, "crossbn.")
    if info.name.split(".")[1] not in ("cli", "report", "experiments")
]
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "nn": nn})
    assert result.failed == 0


def test_some_examples_exist() -> None:
    finder = doctest.DocTestFinder()
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(tests) >= 8


def test_readme_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
