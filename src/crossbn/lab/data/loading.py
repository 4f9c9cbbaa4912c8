"""A data set by its name: from a folder, from the cache, or from afar."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from crossbn.lab.data.digits import digit_pictures
from crossbn.lab.data.download import Watch, obtain
from crossbn.lab.data.layouts import Found, find_in
from crossbn.lab.data.places import cache_folder, data_folder
from crossbn.lab.data.records import DataError, DataSet, Pictures
from crossbn.lab.data.registry import DATASETS
from crossbn.lab.data.store import Parts, read_store, store_path, write_store


def load_pictures(name: str, train: bool, folder: Path | None = None, download: bool = True) -> Pictures:
    """Return a part of a data set, looked for in a folder, then in the cache, then downloaded into the cache.

    Whatever it comes from, its content is compared with a checksum where one is known, that of CIFAR-100's files
    elsewhere. What takes long to decode is kept in the cache.

    Args:
        name: a key of `DATASETS`, but not "imagenet", which is a folder: see `imagenet_folder`.
        train: the pictures to train on, rather than those to test on.
        folder: to look in; None for the variable CROSSBN_DATA's, else `data`.
        download: whether to, if need be.

    Raises:
        DataError: if there is no such data set, or it cannot be had, or what is there is damaged.

    Example:
        >>> load_pictures("digits", train=True).images.shape
        torch.Size([1000, 1, 8, 8])
    """
    dataset = find_dataset(name)
    if name == "imagenet":
        raise DataError("imagenet is too large to be loaded as a whole: it is read from its folder, image by image")
    if name == "digits":
        return digit_pictures(train)
    found = find_pictures(dataset, folder)
    if found is None:
        if not download:
            raise DataError(f"{_absence(dataset, folder)}: `crossbn data get {name}` downloads it")
        return _fetch(dataset, folder, cache_folder(), _announce(name))[train]
    if not found.slow:
        return found.read(train)
    parts = found.read_both()
    # The next time is faster with it, but this time can do without.
    with suppress(OSError):
        write_store(store_path(cache_folder(), name), parts)
    return parts[train]


def find_dataset(name: str) -> DataSet:
    """Return what is known of a data set.

    Raises:
        DataError: if there is none of that name.
    """
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; there is {', '.join(DATASETS)}")
    return DATASETS[name]


def find_pictures(dataset: DataSet, folder: Path | None = None) -> Found | None:
    """Return a data set on the disk, the folder's before the cache's; None if there is none.

    Both have the same content, so one that is ready to use goes before one to decode, wherever it is.
    """
    found = [find_in(place, dataset) for place in (data_folder(folder), cache_folder())]
    return min(filter(None, found), key=lambda each: each.slow, default=None)


def get_pictures(dataset: DataSet, folder: Path | None, watch: Watch) -> Found:
    """Return a data set on the disk, which it is put on if it is not there.

    Args:
        dataset: what to get.
        folder: to have it in; None for wherever it is found, else for the cache.
        watch: told what is being done.

    Raises:
        DataError: if it cannot be had, or not be kept.
    """
    found = find_pictures(dataset) if folder is None else find_in(folder, dataset)
    if found is not None:
        return found
    into = folder or cache_folder()
    elsewhere = find_pictures(dataset)
    if elsewhere is None:
        _fetch(dataset, folder, into, watch)
    else:
        _keep(dataset, elsewhere.read_both(), into)
    return Found(dataset, path := store_path(into, dataset.name), partial(read_store, path, dataset.name))


def _fetch(dataset: DataSet, folder: Path | None, into: Path, watch: Watch) -> Parts:
    """Download a data set that is not in `folder` nor in the cache, and keep it in the folder `into`."""
    try:
        parts = obtain(dataset, watch)
    except DataError as error:
        raise DataError(f"{_absence(dataset, folder)}, and {error}") from error
    except OSError as error:  # of the temporary folder
        raise DataError(f"{dataset.name} cannot be downloaded: {error.strerror or error}") from error
    _keep(dataset, parts, into)
    return parts


def _keep(dataset: DataSet, parts: Parts, into: Path) -> None:
    path = store_path(into, dataset.name)
    try:
        write_store(path, parts)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


def _absence(dataset: DataSet, folder: Path | None) -> str:
    return f"{dataset.name} is not in {data_folder(folder)} nor in {cache_folder()}"


def _announce(name: str) -> Watch:
    """Return what tells on the terminal why there is a wait, once for each thing that is done."""
    said = set()

    def tell(what: str, _: float) -> None:
        if what not in said:
            said.add(what)
            print(f"crossbn: {name} from {what}", file=sys.stderr)

    return tell
