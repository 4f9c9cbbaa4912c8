"""The code in docstrings, in the README and in docs runs and prints what it says."""

import doctest
import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import crossbn
from tests.support import run_python

MODULES = [
    info.name for info in pkgutil.walk_packages(crossbn.__path__, "crossbn.") if info.name.split(".")[1] != "cli"
]
ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "nn": nn})
    assert result.failed == 0


def test_some_examples_exist() -> None:
    finder = doctest.DocTestFinder()
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(tests) >= 8


def test_readme_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks(README) == 1
    printed = capsys.readouterr().out
    assert f"```\n{printed}```" in README.read_text()


def test_readme_is_a_screen_and_a_half() -> None:
    assert len(README.read_text()) <= 4800


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=lambda document: document.name)
def test_code_of_docs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(document)


def run_blocks(document: Path) -> int:
    """Run the Python blocks of a document one after another in one namespace; return how many there are."""
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(document), "exec"), namespace)
    return len(blocks)


def test_derivation_is_among_the_docs() -> None:
    assert ROOT / "docs" / "derivation.md" in DOCUMENTS


def test_api_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    modules = {"compat", "functional", "nn"}
    described = set(re.findall(r":: (?:crossbn\.)?(\w+)$", page, re.MULTILINE))
    assert ({*crossbn.__all__, *crossbn.nn.__all__} - modules) - described == set()


def test_every_page_is_in_the_menu() -> None:
    pages = {path.stem for path in DOCUMENTS[1:]} - {"index"}
    menu = set((ROOT / "docs" / "index.md").read_text().splitlines())
    linked = set(
        re.findall(r"docs/([\w-]+)\.md", "".join(path.read_text() for path in (README, ROOT / "CONTRIBUTING.md")))
    )
    assert pages - menu == set()
    assert linked - pages == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "tools").glob("*.py")))
def test_tools_start(name: str) -> None:
    variables = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    assert "usage: " in run_python(ROOT / "tools" / f"{name}.py", "--help", variables=variables)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    assert [t for t in targets if "://" not in t and not (document.parent / t).exists()] == []
