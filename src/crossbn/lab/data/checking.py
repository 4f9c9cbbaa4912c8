"""Turning what is wrong with a file into a sentence."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crossbn.lab.data.dataset import DataError, DataSet, Pictures, part_name

STORE_SUFFIX = ".npz"
"""Of the files that are ours to remove."""

_MALFORMED = (
    *(ValueError, TypeError, LookupError, EOFError, RuntimeError, SyntaxError),  # Pillow has SyntaxErrors
    *(struct.error, zlib.error, zipfile.BadZipFile, OSError),
)


@contextmanager
def told(path: Path, name: str) -> Iterator[None]:
    """Turn whatever reading the file or folder at `path` raises into a DataError that names it."""
    try:
        yield
    except _MALFORMED as error:
        if isinstance(error, OSError) and error.strerror:  # the system's; decoders raise theirs without a number
            raise DataError(f"{error.filename or path} cannot be read: {error.strerror}") from error
        raise DataError(f"{path} is damaged or incomplete; {_remedy(path, name)}") from error


def check(pictures: Pictures, dataset: DataSet, train: bool, path: Path) -> None:
    """Raise DataError if the pictures, which came from `path`, are not those of the data set."""
    wrong = f"the {part_name(train)} images in {path} are not those of {dataset.name}"
    shape, expected = (*pictures.images.shape,), dataset.shape(train)
    if shape != expected or len(pictures.classes) != len(pictures.images):
        raise DataError(f"{wrong}: they are {shape} in place of {expected}; {_remedy(path, dataset.name)}")
    known = dataset.sha256(train)
    if known is not None and (found := pictures.sha256) != known:
        raise DataError(
            f"{wrong}: their checksum is {found[:12]}... in place of {known[:12]}...; {_remedy(path, dataset.name)}"
        )


def _remedy(path: Path, name: str) -> str:
    if path.suffix == STORE_SUFFIX:
        return f"remove it, then `crossbn data get {name}` gets it anew"
    return "replace what is there, or name another folder with --data-folder"
