"""What the laboratory says of the software it runs on."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import crossbn
from crossbn.lab import environment
from tests.support import run_python

ORIGINS = {
    "a clone": ('{"dir_info": {"editable": true}, "url": "file:///home/me/crossbn"}', "pip install '.[train]'"),
    "a wheel": ('{"archive_info": {}, "url": "file:///tmp/crossbn.whl"}', "pip install 'crossbn[train]'"),
    "a registry": (None, "pip install 'crossbn[train]'"),
}
"""What pip wrote about where it found the package, and what installs an extra of it."""


@pytest.mark.parametrize("case", ORIGINS)
def test_an_extra_comes_from_where_the_package_did(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, command = ORIGINS[case]
    found = SimpleNamespace(read_text=lambda name: origin if name == "direct_url.json" else "")
    monkeypatch.setattr(environment, "distribution", lambda _: found)
    monkeypatch.setattr(crossbn, "__file__", str(tmp_path / "lib" / "crossbn" / "__init__.py"))
    assert environment.install_command("train") == command


def test_sources_on_the_path_are_a_clone() -> None:
    assert environment.install_command("detect") == "pip install '.[detect]'"


def test_there_is_one_openmp() -> None:
    asked = "from crossbn.lab.environment import has_compiled_code; assert has_compiled_code()"
    listed = "import torch; print(*{line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line})"
    (path,) = run_python("-c", f"{asked}; {listed}").split()
    assert path.endswith("torch/lib/libgomp.so.1")
