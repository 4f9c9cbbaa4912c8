"""Imports go down only, and `import crossbn` loads torch and nothing else of weight."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import crossbn

ROOT = Path(crossbn.__file__).parent
LEVELS = [
    {"torch_internals", "schedules", "compat", "messages"},
    {"functional"},
    {"ops"},
    {"pairing"},
    {"nn"},
    {"conversion_report"},
    {"convert", "swap", "history_state", "fold", "recalibrate"},
    {"integrations"},
    {"lab.records"},
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


def test_importing_is_light() -> None:
    own = "crossbn.ops.kernels"  # Triton itself is imported by torch._dynamo where it is installed
    heavy = ("torchvision", "lightning", "matplotlib", "sklearn", "typer", "rich", "timm", "onnx", own)
    code = f"import sys, crossbn; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
