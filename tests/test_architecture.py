"""Imports go down only, and `import crossbn` loads torch and nothing else of weight."""

import ast
from pathlib import Path

import pytest

import crossbn
from tests.support import run_python

ROOT = Path(crossbn.__file__).parent
LEVELS = [
    {"torch_internals", "schedules", "compat", "messages"},
    {"functional"},
    {"ops"},
    {"pairing"},
    {"nn"},
    {"conversion_report"},
    {"convert", "swap", "histories", "folding", "recalibrate"},
    {"integrations"},
    {"lab.earlier_records", "lab.environment", "lab.functions", "lab.norm_names", "lab.progress", "lab.statistics"},
    {"lab.records", "lab.models", "lab.networks", "lab.training"},
    {"lab.cost", "lab.fidelity", "lab.data"},
    {"lab.check"},
    {"lab.recipes"},
    {"lab.experiments"},
    {"lab.report"},
    {"cli"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = sorted(
    path for path in ROOT.rglob("*.py") if path.parent not in (ROOT, ROOT / "lab") or path.stem != "__init__"
)


def part(names: list[str]) -> str:
    """The part of crossbn that a module belongs to: the laboratory has parts of its own."""
    return ".".join(names[: 2 if names[0] == "lab" else 1])


def imported(path: Path) -> set[str]:
    """Names of the parts of crossbn that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("crossbn", "crossbn.lab"):
            found |= {part([*node.module.split(".")[1:], alias.name]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("crossbn."):
            found.add(part(node.module.split(".")[1:]))
        elif isinstance(node, ast.Import):
            found |= {part(alias.name.split(".")[1:]) for alias in node.names if alias.name.startswith("crossbn.")}
    return {name for name in found if not name.startswith("__")}


def part_of(path: Path) -> str:
    return part(list(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own = LEVEL_OF[part_of(path)]
    upward = {name for name in imported(path) if LEVEL_OF[name] > own}
    assert not upward, f"{path.name} is on level {own} and imports {upward}"


def test_public_names_are_there_when_they_are_used() -> None:
    code = "import sys, crossbn; before = 'torch' in sys.modules; from crossbn import *; print(before, fold, nn.NORMS)"
    assert run_python("-c", code).startswith("False <function fold at ")
    for name in crossbn.__all__:
        assert name in dir(crossbn)
        assert getattr(crossbn, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="module 'crossbn' has no attribute 'convert__'"):
        _ = crossbn.convert__  # type: ignore[attr-defined]  # there is none


def test_no_module_hides_a_public_function() -> None:
    modules = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    hidden = {name for name in crossbn.__all__ if name in modules and not (ROOT / name).is_dir()}
    assert hidden == {"compat"}  # which is a module, and meant


def test_importing_is_light() -> None:
    own = "crossbn.ops.kernels"  # Triton itself is imported by torch._dynamo where it is installed
    heavy = ("torch._dynamo", "torchvision", "lightning", "matplotlib", "sklearn", "typer", "rich", "timm", "onnx", own)
    code = f"import sys, crossbn; print([name for name in {heavy} if name in sys.modules])"
    assert run_python("-c", code).strip() == "[]"
