"""What `pip install` gets: wheels with and without compiled code, and the sources."""

import shutil
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

import crossbn
from tests.support import run_python

ROOT = Path(__file__).parent.parent
INPUTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def pip(*words: str | Path, **variables: str) -> None:
    """Run pip, whose words are shown if it fails."""
    run_python("-m", "pip", "--quiet", "--disable-pip-version-check", *words, variables=variables)


def build_and_try(folder: Path, *options: str, native: str) -> Path:
    """Build a wheel of a copy of the sources, install it into a folder of its own, and run the smoke test there."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in INPUTS:
        shutil.copy(ROOT / name, sources)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sources, CROSSBN_NATIVE=native)
    (wheel,) = folder.glob("*.whl")
    pip("install", "--no-deps", "--target", folder / "installed", wheel)
    variables = {"PYTHONPATH": str(folder / "installed"), "CROSSBN_NATIVE": "1"}
    printed = run_python(ROOT / "tools" / "smoke.py", *options, variables=variables)
    assert f"crossbn {crossbn.__version__} in {folder / 'installed' / 'crossbn'} works" in printed
    return wheel


@pytest.mark.slow
def test_wheel_with_compiled_code(tmp_path: Path) -> None:
    wheel = build_and_try(tmp_path, "--compiled", native="1")
    names = ZipFile(wheel).namelist()
    assert len([name for name in names if name.startswith("crossbn/ops/_native.")]) == 1
    assert "crossbn/py.typed" in names
    assert "crossbn/lab/report/page.html.jinja" in names
    assert not [name for name in names if name.endswith((".h", ".c"))]
    information = f"crossbn-{crossbn.__version__}.dist-info"
    assert f"{information}/licenses/LICENSE" in names
    metadata = message_from_string(ZipFile(wheel).read(f"{information}/METADATA").decode())
    assert metadata["Version"] == crossbn.__version__
    assert metadata["License-Expression"] == "MIT"
    without_extras = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.split(">")[0] for line in without_extras] == ["torch"]
    assert "crossbn = crossbn.cli:main" in ZipFile(wheel).read(f"{information}/entry_points.txt").decode()


@pytest.mark.slow
def test_pure_wheel(tmp_path: Path) -> None:
    wheel = build_and_try(tmp_path, native="0")
    assert wheel.name == f"crossbn-{crossbn.__version__}-py3-none-any.whl"
    assert not [name for name in ZipFile(wheel).namelist() if "_native" in name]


def test_version_has_one_place() -> None:
    found = [
        path.relative_to(ROOT)
        for path in [ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "src").rglob("*.py")]
        if f'"{crossbn.__version__}"' in path.read_text()
    ]
    assert found == [Path("src/crossbn/__init__.py")]
