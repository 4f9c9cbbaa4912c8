"""Folder, cache and temporary files of a test's own, so that it finds nothing by chance and leaves nothing."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from crossbn.lab.data import FOLDER_VARIABLE


class Places(NamedTuple):
    folder: Path
    cache: Path
    temporary: Path


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    found = Places(tmp_path / "folder", tmp_path / "home" / "crossbn", tmp_path / "temporary")
    found.temporary.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(found.folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.cache.parent))
    monkeypatch.setattr(tempfile, "tempdir", str(found.temporary))
    return found
