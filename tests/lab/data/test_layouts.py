import gzip
from pathlib import Path

import pytest

from crossbn.lab.data import DATASETS, DataError
from crossbn.lab.data.layouts import Found, find_in
from crossbn.lab.data.store import write_store
from tests.lab.data.tiny import (
    assert_same,
    make_parts,
    shrink,
    write_batches,
    write_idx,
    write_mosaics,
    write_rows,
)

LAYOUTS = [
    *(("cifar10", layout) for layout in ("store", "batches", "rows", "mosaics")),
    *(("cifar100", layout) for layout in ("store", "batches")),
    *(("fashion_mnist", layout) for layout in ("store", "raw", "gz", "raw gz", "plain")),
]


def write(name: str, layout: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a data set and return the file or folder that it is recognized by."""
    parts = make_parts(name)
    if layout == "store":
        write_store(folder / f"{name}.npz", parts)
        return folder / f"{name}.npz"
    if layout == "batches":
        return write_batches(folder, name, parts, monkeypatch)
    if name == "cifar10":
        (write_rows if layout == "rows" else write_mosaics)(folder, parts)
        return folder
    inner = folder / "FashionMNIST" / "raw" if "raw" in layout else folder
    write_idx(inner, parts, ".gz" if "gz" in layout else "")
    return inner


def find(name: str, place: Path) -> Found:
    found = find_in(place, shrink(name, make_parts(name)))
    assert found is not None
    return found


@pytest.mark.parametrize("inner", ["", "own"])
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_reads_every_layout(
    name: str, layout: str, inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(name, layout, tmp_path / name if inner else tmp_path, monkeypatch)
    found = find(name, tmp_path)
    assert found.path == path
    for train, expected in make_parts(name).items():
        assert_same(found.read(train), expected)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist", "imagenet"])
def test_finds_nothing_where_nothing_is(name: str, tmp_path: Path) -> None:
    dataset = DATASETS[name]
    assert find_in(tmp_path, dataset) is None
    assert find_in(tmp_path / "nowhere", dataset) is None


@pytest.mark.parametrize(
    ("name", "layout", "file"),
    [
        ("cifar10", "store", "cifar10.npz"),
        ("cifar10", "batches", "cifar-10-batches-py/data_batch_3"),
        ("cifar10", "rows", "data_batch_2.png"),
        ("cifar10", "rows", "train_lables.json"),
        ("cifar10", "mosaics", "data_batch_5.webp"),
        ("cifar10", "mosaics", "labels.npz"),
        ("cifar100", "store", "cifar100.npz"),
        ("cifar100", "batches", "cifar-100-python/train"),
        ("fashion_mnist", "gz", "train-images-idx3-ubyte.gz"),
        ("fashion_mnist", "gz", "train-labels-idx1-ubyte.gz"),
        ("fashion_mnist", "plain", "train-images-idx3-ubyte"),
    ],
)
@pytest.mark.parametrize("damage", ["halved", "emptied", "replaced"])
def test_says_what_is_damaged(
    name: str, layout: str, file: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(name, layout, tmp_path, monkeypatch)
    content = (tmp_path / file).read_bytes()
    damaged = {"halved": content[: len(content) // 2], "emptied": b"", "replaced": b"something else " * 9}[damage]
    (tmp_path / file).write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        find(name, tmp_path).read(train=True)
    assert f"{path} is damaged or incomplete; " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "layout"), [each for each in LAYOUTS if each[0] != "cifar100"])
def test_other_pictures_are_refused(name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts(name)
    path = write(name, layout, tmp_path, monkeypatch)
    parts[True].images[0, 0, 0, 0] ^= 1  # what is known is now of a picture that differs in a bit
    found = find_in(tmp_path, shrink(name, parts))
    assert found is not None
    assert_same(found.read(train=False), parts[False])
    with pytest.raises(DataError, match=r"training images in .* are not those of .*: their checksum is") as caught:
        found.read(train=True)
    assert str(path) in str(caught.value)
    assert parts[True].sha256[:12] in str(caught.value)


def test_too_few_pictures_are_refused(tmp_path: Path) -> None:
    parts = make_parts("fashion_mnist")
    write_idx(tmp_path, {**parts, False: parts[True]})
    found = find("fashion_mnist", tmp_path)
    with pytest.raises(DataError, match=r"they are \(6, 1, 28, 28\) in place of \(4, 1, 28, 28\)"):
        found.read(train=False)


def test_missing_file_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path, make_parts("fashion_mnist"))
    missing = tmp_path / "t10k-labels-idx1-ubyte.gz"
    missing.unlink()
    found = find("fashion_mnist", tmp_path)
    assert len(found.read(train=True).classes) == 6
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz cannot be read: No such file"):
        found.read(train=False)


def test_idx_of_other_numbers_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, make_parts("fashion_mnist"))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content[:2] + b"\x0d" + content[3:]))  # floats, it says
    with pytest.raises(DataError, match="is damaged"):
        find("fashion_mnist", tmp_path).read(train=True)


def test_what_to_do_depends_on_whose_file_it_is(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "cifar100.npz").write_bytes(b"")
    with pytest.raises(DataError, match="remove it, then `crossbn data get cifar100` gets it anew"):
        find("cifar100", tmp_path / "ours").read(train=True)
    write_rows(tmp_path / "theirs", make_parts("cifar10"))
    (tmp_path / "theirs" / "data_batch_1.png").write_bytes(b"")
    with pytest.raises(DataError, match="replace what is there, or name another folder with --data"):
        find("cifar10", tmp_path / "theirs").read(train=True)
