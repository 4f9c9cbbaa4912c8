"""What is known of a data set, where it comes from, what a part of it is in memory, and what is wrong with a file."""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # whoever asks what data sets there are does not wait for it
    from torch import Tensor

STORE_SUFFIX = ".npz"
"""Of the files that are ours to remove."""

_MALFORMED = (
    *(ValueError, TypeError, LookupError, EOFError, RuntimeError, SyntaxError),  # Pillow has SyntaxErrors
    *(struct.error, zlib.error, zipfile.BadZipFile, OSError),
)


class DataError(Exception):
    """A data set is missing or damaged; the message is a sentence that says which, where, and what helps."""


class Pictures(NamedTuple):
    """A part of a data set: images [N, C, H, W] as bytes, and the class of each [N]."""

    images: Tensor
    classes: Tensor

    @property
    def sha256(self) -> str:
        """Of the images' bytes, followed by a byte for the class of each.

        It is of the content, so that it is the same whatever file the pictures came in.

        Example:
            >>> Pictures(torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.tensor([0, 1])).sha256[:8]
            'b40711a8'
        """
        found = hashlib.sha256(self.images.contiguous().numpy().data)
        found.update(self.classes.byte().contiguous().numpy().data)
        return found.hexdigest()


@dataclass(frozen=True)
class Source:
    """Commands that put the files of a data set into the folder that they are run in.

    Attributes:
        name: what people know it as.
        commands: run one after another; a word with a star stands for the one file that it matches.
        sha256: of each file that is used, by its name in `folder`.
        size_bytes: about how much is transferred.
        folder: where the commands leave the files.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    sha256: Mapping[str, str]
    size_bytes: int
    folder: str = "."


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set.

    Attributes:
        name: its key in `DATASETS`.
        classes: how many.
        channels: of an image.
        image_size: height and width; where images differ, the size that networks are trained with.
        train_images: how many there are to train on.
        test_images: how many there are to test on.
        origin: whom to cite, and the licence.
        train_sha256: of the pictures to train on, as `Pictures.sha256` has it; None where it is not known.
        test_sha256: of the pictures to test on.
        kind: "pictures" that fit into memory, "folders" of images for each class, or "scenes" with objects in them.
        layouts: how it is recognized on a disk, beside the one file that downloads are kept in: functions of a folder
            and the data set that return what is there as `layouts.Found`, or None.
        sources: of a download, the best first.
    """

    name: str
    classes: int
    channels: int
    image_size: int
    train_images: int
    test_images: int
    origin: str
    train_sha256: str | None = None
    test_sha256: str | None = None
    kind: str = "pictures"
    layouts: tuple[Callable[[Path, DataSet], Any], ...] = ()
    sources: tuple[Source, ...] = ()

    def shape(self, train: bool) -> tuple[int, int, int, int]:
        """Return the shape of a part's images."""
        images = self.train_images if train else self.test_images
        return (images, self.channels, self.image_size, self.image_size)

    def sha256(self, train: bool) -> str | None:
        """Return the checksum of a part, None if it is not known."""
        return self.train_sha256 if train else self.test_sha256


def part_name(train: bool) -> str:
    """Return what a part of a data set is called.

    Example:
        >>> part_name(train=True), part_name(train=False)
        ('training', 'test')
    """
    return "training" if train else "test"


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
