"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import crossbn.lab.report

MODULES = [info.name for info in pkgutil.iter_modules(crossbn.lab.report.__path__, "crossbn.lab.report.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_some_examples_exist() -> None:
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 10
