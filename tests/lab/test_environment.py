"""What the laboratory says of the software it runs on."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from crossbn.lab import environment
from tests.support import run_python

ORIGINS = {
    "a clone": ('{"dir_info": {"editable": true}, "url": "file:///home/me/crossbn"}', "pip install '.[train]'"),
    "a wheel": ('{"archive_info": {}, "url": "file:///tmp/crossbn.whl"}', "pip install 'crossbn[train]'"),
    "a registry": (None, "pip install 'crossbn[train]'"),
}
"""What pip wrote about where it found the package, and what installs an extra of it."""


@pytest.mark.parametrize("case", ORIGINS)
def test_an_extra_comes_from_where_the_package_did(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, command = ORIGINS[case]
    found = SimpleNamespace(read_text=lambda name: origin if name == "direct_url.json" else "")
    monkeypatch.setattr(environment, "distribution", lambda _: found)
    assert environment.install_command("train") == command


def test_sources_on_the_path_are_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(environment, "distribution", fail)
    assert environment.install_command("detect") == "pip install '.[detect]'"


def test_there_is_one_openmp() -> None:
    asked = "from crossbn.lab.environment import has_compiled_code; assert has_compiled_code()"
    listed = "import torch; print(*{line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line})"
    (path,) = run_python("-c", f"{asked}; {listed}").split()
    assert path.endswith("torch/lib/libgomp.so.1")
