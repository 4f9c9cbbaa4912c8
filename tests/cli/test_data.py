import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import crossbn.cli.data as verb
from crossbn.cli import extras, make_app
from crossbn.lab.data import DATASETS, FOLDER_VARIABLE, Source
from crossbn.lab.data.store import write_store
from tests.lab.data.tiny import PICTURE_NAMES, make_parts, shrink, write_idx


class Answer(NamedTuple):
    status: int
    output: str
    errors: str


def call(*words: str | Path) -> Answer:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(make_app(), ["data", *(str(word) for word in words)])
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny data sets whose source is a program that fails; returns where they are looked for."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "folder"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    install(tmp_path, "echo no way there >&2; exit 1")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    source = Source("afar", (("crossbn-fetch",),), {}, 1000)
    for name in PICTURE_NAMES:
        monkeypatch.setitem(DATASETS, name, shrink(name, make_parts(name), sources=(source,)))
    return tmp_path / "folder"


def install(tmp_path: Path, script: str) -> None:
    """Let this shell script be what downloads."""
    program = tmp_path / "programs" / "crossbn-fetch"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def row(output: str, name: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if f" {name} " in line]
    return [cell.strip() for cell in re.split("[|│┃]", line)][1:-1]


def test_list(folder: Path, tmp_path: Path) -> None:
    write_idx(folder, make_parts("fashion_mnist"))
    write_store(tmp_path / "home" / "crossbn" / "cifar100.npz", make_parts("cifar100"))
    answer = call("list")
    assert (answer.status, answer.errors) == (0, "")
    assert row(answer.output, "cifar10") == ["cifar10", "20 + 4", "10", "no", "afar"]
    assert row(answer.output, "cifar100") == ["cifar100", "8 + 4", "100", "cache", "afar"]
    assert row(answer.output, "fashion_mnist") == ["fashion_mnist", "6 + 4", "10", "folder", "afar"]
    assert row(answer.output, "digits") == ["digits", "1,000 + 797", "10", "yes", "scikit-learn"]
    assert row(answer.output, "coco")[3:] == ["no", "a folder of yours"]
    assert row(answer.output, "shapes")[3:] == ["yes", "drawn"]
    assert row(answer.output, "imagenet") == ["imagenet", "1,281,167 + 50,000", "1,000", "no", "a folder of yours"]
    assert f"Looked for in the folder {folder} (" in answer.output
    assert f"then in the cache {tmp_path / 'home' / 'crossbn'}." in answer.output


def test_list_of_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "imagenet", replace(DATASETS["imagenet"], classes=1))
    (tmp_path / "mine" / "imagenet" / "train" / "dogs").mkdir(parents=True)
    monkeypatch.setattr(verb, "find_spec", lambda _: None)
    answer = call("list", "--data-folder", tmp_path / "mine")
    assert row(answer.output, "imagenet")[3] == "folder"
    assert row(answer.output, "fashion_mnist")[3] == "no"
    assert row(answer.output, "digits")[3] == "no"


def test_get(tmp_path: Path) -> None:
    parts = make_parts("cifar10")
    write_store(tmp_path / "cifar10.npz", parts)
    install(tmp_path, f"cp {tmp_path}/cifar10.npz .")
    for _ in range(2):
        answer = call("get", "cifar10")
        assert answer.status == 0, answer.errors
        path = tmp_path / "home" / "crossbn" / "cifar10.npz"
        assert answer.output.splitlines() == [
            "cifar10: 20 training and 4 test images of 10 classes",
            f"in {path}",
            f"sha256 of the training images and classes: {parts[True].sha256}",
            f"sha256 of the test images and classes: {parts[False].sha256}",
            DATASETS["cifar10"].origin,
        ]
        assert "comparing checksums" in answer.errors
        install(tmp_path, "exit 1")  # not asked again
    answer = call("get", "cifar10", "--data-folder", tmp_path / "mine")
    assert f"in {tmp_path / 'mine' / 'cifar10.npz'}" in answer.output.splitlines()


def test_what_needs_no_download(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = call("get", "digits")
    assert answer.status == 0
    assert "in scikit-learn" in answer.output.splitlines()
    assert f"sha256 of the test images and classes: {DATASETS['digits'].test_sha256}" in answer.output
    monkeypatch.setitem(DATASETS, "imagenet", replace(DATASETS["imagenet"], classes=1))
    for part in ("train", "val"):
        (folder / "imagenet" / part / "dogs").mkdir(parents=True)
    assert "nowhere: they are drawn when they are asked for" in call("get", "shapes").output
    (folder / "coco").mkdir()
    assert f"in {folder}/coco, not compared with a checksum" in call("get", "coco").output
    answer = call("get", "imagenet")
    places = f"in {folder}/imagenet/train and {folder}/imagenet/val"
    assert answer.output.splitlines()[1] == f"{places}, not compared with a checksum"


def test_usage_errors() -> None:
    answer = call("get", "faces")
    assert (answer.status, answer.output) == (2, "")
    known = "there are imagenet, cifar10, cifar100, fashion_mnist, digits, coco, shapes"
    assert answer.errors.splitlines()[-1].endswith(f"there is no data set 'faces': {known}")
    assert "did you mean cifar10" in call("get", "cifar1").errors
    assert call("get").status == 2
    assert call("get", "cifar10", "--data-folder", __file__).status == 2


def test_failures_end_with_a_sentence_and_leave_nothing(folder: Path, tmp_path: Path) -> None:
    answer = call("get", "cifar10")
    absence = f"cifar10 is not in {folder} nor in {tmp_path / 'home' / 'crossbn'}"
    sentence = f"crossbn: {absence}, and it could not be downloaded (afar: no way there)"
    assert (answer.status, answer.output, answer.errors.splitlines()[-1]) == (1, "", sentence)
    answer = call("get", "imagenet")
    assert answer.status == 1
    assert answer.errors.startswith(f"crossbn: ImageNet is not in {folder}/imagenet/train: ")
    assert not folder.exists()
    assert not (tmp_path / "home").exists()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_damaged_data_is_named(folder: Path) -> None:
    write_store(folder / "cifar10.npz", make_parts("cifar10"))
    (folder / "cifar10.npz").write_bytes(b"damaged")
    answer = call("get", "cifar10")
    assert (answer.status, answer.output) == (1, "")
    assert answer.errors.splitlines()[-1].startswith(f"crossbn: {folder / 'cifar10.npz'} is damaged or incomplete; ")


def test_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "fetch", interrupted)
    answer = call("get", "cifar10")
    assert (answer.status, answer.errors.splitlines()[-1]) == (130, "crossbn: interrupted; nothing was kept")
    assert not (tmp_path / "home").exists()


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "PIL" else name)
    answer = call("get", "cifar10")
    assert answer.status == 1
    assert "needs PIL: pip install '.[train]'" in answer.output
