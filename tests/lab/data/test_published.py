"""torchvision's downloads, from a server on this machine."""

import gzip
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError

import pytest

from crossbn.compat import ensure_torchvision
from crossbn.lab.data import published
from crossbn.lab.data.layouts import find_in
from tests.lab.data.tiny import assert_same, make_parts, shrink, write_batches, write_idx

# Python 3.12 and 3.13 warn of torchvision's way to unpack.
pytestmark = pytest.mark.filterwarnings("ignore:Python 3.14:DeprecationWarning")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the folder `served`; return its address."""
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "served").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "served")) as serving:
        thread = Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_address[1]}"
        finally:
            serving.shutdown()
            thread.join()


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def serve_cifar(name: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from torchvision import datasets

    kind = getattr(datasets, name.upper())
    place = write_batches(tmp_path / "made", name, make_parts(name), monkeypatch)
    archive = tmp_path / "served" / "archive.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", place.parent, place.name], check=True)
    monkeypatch.setattr(kind, "url", f"{server}/archive.tar.gz")
    monkeypatch.setattr(kind, "tgz_md5", md5(archive))
    return archive


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_arrives(name: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_torchvision()
    archive = serve_cifar(name, server, tmp_path, monkeypatch)
    published.download(name.upper(), tmp_path / "folder")
    parts = make_parts(name)
    found = find_in(tmp_path / "folder", shrink(name, parts))
    assert found is not None
    assert_same(found.read(train=True), parts[True])
    assert_same(found.read(train=False), parts[False])
    assert len(list((tmp_path / "folder").glob("cifar-10*-python.tar.gz"))) == 1  # whose checksum is compared
    assert archive.exists()


def test_fashion_mnist_arrives(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_torchvision()
    from torchvision.datasets import FashionMNIST

    parts = make_parts("fashion_mnist")
    write_idx(tmp_path / "served", parts)
    resources = [(name, md5(tmp_path / "served" / name)) for name, _ in FashionMNIST.resources]
    monkeypatch.setattr(FashionMNIST, "resources", resources)
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"{server}/"])
    published.download("FashionMNIST", tmp_path / "folder")
    raw = tmp_path / "folder" / "FashionMNIST" / "raw"
    found = find_in(raw, shrink("fashion_mnist", parts))
    assert found is not None
    assert_same(found.read(train=False), parts[False])
    assert gzip.decompress((raw / resources[0][0]).read_bytes())[:4] == b"\x00\x00\x08\x03"


@pytest.mark.parametrize("damage", [True, False])
def test_ends_with_a_sentence(
    damage: bool, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure_torchvision()
    archive = serve_cifar("cifar10", server, tmp_path, monkeypatch)
    if damage:
        archive.write_bytes(archive.read_bytes()[:-1] + b"!")
    else:
        archive.unlink()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(sys, "argv", ["published", "CIFAR10"])
    timeouts: list[float] = []
    monkeypatch.setattr("socket.setdefaulttimeout", timeouts.append)
    with pytest.raises(SystemExit) as caught:
        published.main()
    assert caught.value.code == ("File not found or corrupted." if damage else "HTTP Error 404: File not found")
    if isinstance(error := caught.value.__context__, HTTPError):
        error.close()  # the process would end here, and the connection with it
    assert timeouts == [published.SECONDS]
    assert capsys.readouterr().err == ""
