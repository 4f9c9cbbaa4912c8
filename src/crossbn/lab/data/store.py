"""A data set as one file: both parts as arrays, ready to be used."""

import os
from pathlib import Path
from typing import Any

from crossbn.lab.data.dataset import STORE_SUFFIX, Pictures, told

Parts = dict[bool, Pictures]
"""What to train on under True, what to test on under False."""

_NAMES = {True: "train", False: "test"}


def store_path(folder: Path, name: str) -> Path:
    """Return where a data set is kept in a folder."""
    return folder / f"{name}{STORE_SUFFIX}"


def write_store(path: Path, parts: Parts) -> None:
    """Write both parts. The file appears when it is complete, and a failure leaves nothing.

    Raises:
        OSError: if the file cannot be written.
    """
    import numpy as np  # torch does without

    arrays: dict[str, Any] = {}
    for train, (images, classes) in parts.items():
        arrays[f"{_NAMES[train]}_images"] = images.numpy()
        arrays[f"{_NAMES[train]}_classes"] = classes.byte().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    growing = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with growing.open("wb") as file:
            np.savez(file, **arrays)
        growing.replace(path)
    finally:
        growing.unlink(missing_ok=True)


def read_store(path: Path, name: str, train: bool) -> Pictures:
    """Return a part. Every array has a checksum in the file, which reading it verifies.

    Raises:
        DataError: if the file is damaged.
    """
    import numpy as np
    import torch

    # np.load would leave a file open that it cannot read.
    with told(path, name), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, classes = (arrays[f"{_NAMES[train]}_{what}"] for what in ("images", "classes"))
        return Pictures(torch.from_numpy(images), torch.from_numpy(classes).long())
