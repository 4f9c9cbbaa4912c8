"""Where data is looked for."""

import os
from pathlib import Path

from crossbn.lab.data.catalogue import DATASETS
from crossbn.lab.data.dataset import DataError

FOLDER_VARIABLE = "CROSSBN_DATA"


def data_folder(folder: Path | None = None) -> Path:
    """Return the folder of the data sets: the given one, else the variable CROSSBN_DATA's, else `data`.

    Example:
        >>> data_folder(Path("/mnt/data")).parts
        ('/', 'mnt', 'data')
    """
    return folder if folder is not None else Path(os.environ.get(FOLDER_VARIABLE) or "data").expanduser()


def cache_folder() -> Path:
    """Return where downloads and decoded data sets are kept: in XDG_CACHE_HOME, `~/.cache` if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "crossbn"


def imagenet_folder(train: bool, folder: Path | None = None) -> Path:
    """Return the folder of ImageNet's training or validation images, a folder for each class in it.

    It is `imagenet/train` or `imagenet/val` in the folder of the data sets, or just `train` or `val` there.

    Args:
        train: the images to train on, rather than those to test on.
        folder: of the data sets; None for the variable CROSSBN_DATA's, else `data`.

    Raises:
        DataError: if it is not there, or has not ImageNet's 1000 classes.
    """
    base, part, expected = data_folder(folder), "train" if train else "val", DATASETS["imagenet"].classes
    place = base / "imagenet" / part
    if not place.is_dir() and _count_folders(base / part) == expected:
        return base / part
    if not place.is_dir():
        raise DataError(
            f"ImageNet is not in {place}: put a folder with the images of each class there, or name the folder that "
            f"has imagenet/{part} in it with --data-folder or {FOLDER_VARIABLE}"
        )
    if (found := _count_folders(place)) != expected:
        raise DataError(f"{place} has {found} classes in place of ImageNet's {expected}")
    return place


def _count_folders(place: Path) -> int:
    return sum(entry.is_dir() for entry in place.iterdir()) if place.is_dir() else 0
