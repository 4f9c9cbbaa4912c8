"""A data set by its name: from a folder, from the cache, or from afar."""

import sys
from functools import partial
from pathlib import Path

from crossbn.lab.data.catalogue import DATASETS, names_of
from crossbn.lab.data.dataset import DataError, DataSet, Pictures
from crossbn.lab.data.download import Watch, obtain
from crossbn.lab.data.layouts import Found, find_in
from crossbn.lab.data.places import cache_folder, data_folder
from crossbn.lab.data.store import Parts, read_store, store_path, write_store
from crossbn.messages import no_such


def load_pictures(name: str, train: bool, folder: Path | None = None, download: bool = True) -> Pictures:
    """Return a part of a data set, wherever `fetch` finds it.

    Its content is compared with a checksum where one is known, that of CIFAR-100's files elsewhere.

    Raises:
        DataError: if there is no such data set, or it cannot be had, or what is there is damaged.

    Example:
        >>> load_pictures("digits", train=True).images.shape
        torch.Size([1000, 1, 8, 8])
    """
    return fetch(name, folder, download=download).read(train)


def fetch(
    name: str, folder: Path | None = None, into: Path | None = None, download: bool = True, watch: Watch | None = None
) -> Found:
    """Return a data set on the disk, which it is put on if it is not there.

    It is used where it is found; only what is downloaded is kept in the cache.

    Args:
        name: a key of `DATASETS` whose kind is "pictures".
        folder: to look in before the cache; None for the variable CROSSBN_DATA's, else `data`.
        into: a folder to have it in; None for wherever it is found, else for the cache.
        download: whether to, if need be.
        watch: told what is being done; None to say it on the terminal.

    Raises:
        DataError: if there is no such data set, or it cannot be had, or not be kept.
    """
    dataset = find_dataset(name)
    found = find_pictures(dataset, folder) if into is None else find_in(into, dataset)
    if found is not None:
        return found
    elsewhere = None if into is None else find_pictures(dataset, folder)
    if elsewhere is None and not download:
        raise DataError(f"{_absence(dataset, folder)}: `crossbn data get {name}` downloads it")
    parts = _download(dataset, folder, watch or _announce(name)) if elsewhere is None else elsewhere.read_both()
    path = store_path(into or cache_folder(), name)
    try:
        write_store(path, parts)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
    return Found(dataset, path, partial(read_store, path, name))


def find_dataset(name: str) -> DataSet:
    """Return what is known of a data set whose pictures fit into memory.

    Raises:
        DataError: if there is none of that name.
    """
    if name not in DATASETS:
        raise DataError(no_such("data set", name, names_of("pictures")))
    if DATASETS[name].kind != "pictures":
        raise DataError(f"{name} is too large to be loaded as a whole: it is read from its folder, image by image")
    return DATASETS[name]


def find_pictures(dataset: DataSet, folder: Path | None = None) -> Found | None:
    """Return a data set on the disk, the folder's before the cache's; None if there is none."""
    return find_in(data_folder(folder), dataset) or find_in(cache_folder(), dataset)


def _download(dataset: DataSet, folder: Path | None, watch: Watch) -> Parts:
    try:
        return obtain(dataset, watch)
    except DataError as error:
        raise DataError(f"{_absence(dataset, folder)}, and {error}") from error
    except OSError as error:  # of the temporary folder
        raise DataError(f"{dataset.name} cannot be downloaded: {error.strerror or error}") from error


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
