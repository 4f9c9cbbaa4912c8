from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossbn.lab.data import DataError
from crossbn.lab.data.store import read_store, store_path, write_store
from tests.lab.data.tiny import assert_same, make_parts


def test_gives_back_what_was_written(tmp_path: Path) -> None:
    path = store_path(tmp_path / "new" / "folder", "cifar100")
    parts = make_parts("cifar100")
    write_store(path, parts)
    assert [each.name for each in path.parent.iterdir()] == ["cifar100.npz"]
    for train, expected in parts.items():
        assert_same(read_store(path, "cifar100", train), expected)


def test_every_damaged_byte_of_a_picture_is_noticed(tmp_path: Path) -> None:
    path, parts = store_path(tmp_path, "cifar100"), make_parts("cifar100")
    write_store(path, parts)
    content = bytearray(path.read_bytes())
    start = content.index(parts[True].images.numpy().tobytes())
    for place in (start, start + 1000, start + parts[True].images.numel() - 1):
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{path} is damaged or incomplete"):
            read_store(path, "cifar100", train=True)
        assert_same(read_store(path, "cifar100", train=False), parts[False])
        content[place] ^= 1


@pytest.mark.parametrize("mishap", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_writing_leaves_what_was_there(
    mishap: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parts = store_path(tmp_path / "kept", "fashion_mnist"), make_parts("fashion_mnist")

    def names() -> list[str]:
        return [each.name for each in path.parent.iterdir()]

    def half(file: Any, **_: Any) -> None:
        file.write(b"half of it")
        file.flush()
        assert len(names()) == len(before) + 1  # it is written beside, under another name
        raise mishap

    monkeypatch.setattr(np, "savez", half)
    before: list[str] = []
    with pytest.raises(type(mishap)):
        write_store(path, parts)
    assert names() == before
    monkeypatch.undo()
    write_store(path, parts)
    monkeypatch.setattr(np, "savez", half)
    before = ["fashion_mnist.npz"]
    with pytest.raises(type(mishap)):
        write_store(path, {True: parts[False], False: parts[True]})
    assert names() == before
    assert_same(read_store(path, "fashion_mnist", train=True), parts[True])


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "cifar10.npz"
    with path.open("wb") as file:
        np.savez(file, train_images=np.array([{}], dtype=object), train_classes=np.zeros(1))
    with pytest.raises(DataError, match="is damaged"):
        read_store(path, "cifar10", train=True)
