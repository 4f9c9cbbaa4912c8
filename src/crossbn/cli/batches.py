"""Batches to train on, by name and without end: of a data set, of noise, or of a function of one's own."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from crossbn.cli.extras import require
from crossbn.cli.named import MistakeError, find_function
from crossbn.lab.data import DATASETS, imagenet_folder, load_pictures, names_of
from crossbn.lab.fidelity.batches import BatchError, Call, count_examples
from crossbn.messages import no_such

RANDOM = "random"
NAMES = (*names_of("pictures", "folders"), RANDOM)
_RANDOM_CLASSES = 10
_PAIR = "a batch is a pair of input and target, as a DataLoader has it"

Batch = tuple[Any, Any]
"""What the model is called with, and what the loss compares its output with."""


@dataclass(frozen=True)
class BatchSpec:
    """What batches shall be like; a function of one's own decides that itself, but for the seed.

    Attributes:
        batch_size: images each.
        channels: grey images are repeated, coloured ones averaged for one channel.
        size: height and width.
        seed: of the order, or of the noise.
        folder: of the data sets; None for the variable CROSSBN_DATA's, else `data`.
    """

    batch_size: int
    channels: int
    size: int
    seed: int
    folder: Path | None = None

    @property
    def generator(self) -> torch.Generator:
        """Return the source of random numbers at its beginning."""
        return torch.Generator().manual_seed(self.seed)


def find_batches(data: str, spec: BatchSpec) -> Iterator[Batch]:
    """Return batches without end.

    Args:
        data: one of `NAMES`; a folder with a folder for each class in it, or in its `train`; or
            `package.module:function` for a function without arguments that returns an iterable of pairs of input and
            target, which is gone through again, or made again if it is an iterator, when it ends.
        spec: what batches shall be like.

    Raises:
        typer.BadParameter: if there is no such data, or not with as many channels.
        DataError: if a data set is missing or damaged.
        MistakeError: when they are gone through, if a function of one's own yields something else.
    """
    if ":" in data:
        return _own(data, find_function(data, "--data", arguments=0), spec.seed)
    if data not in NAMES and Path(data).is_dir():
        return _files(Path(data, "train") if Path(data, "train").is_dir() else Path(data), spec)
    if data not in NAMES:
        hint = "images of your own are a folder, batches of your own package.module:function"
        raise typer.BadParameter(f"{no_such('data set', data, NAMES)}; {hint}", param_hint="--data")
    if data == RANDOM:
        return _noise(spec)
    own = DATASETS[data].channels
    if own > 1 and spec.channels not in (1, own):
        problem = f"the images of {data} have {own} channels, which can be made 1, not {spec.channels}"
        raise typer.BadParameter(problem, param_hint="--channels")
    if data == "imagenet":
        return _files(imagenet_folder(train=True, folder=spec.folder), spec)
    return _pictures(data, spec)


def _noise(spec: BatchSpec) -> Iterator[Batch]:
    """Yield batches of noise, labelled at random."""
    generator = spec.generator
    while True:
        images = torch.randn(spec.batch_size, spec.channels, spec.size, spec.size, generator=generator)
        yield images, torch.randint(_RANDOM_CLASSES, (spec.batch_size,), generator=generator)


def _pictures(name: str, spec: BatchSpec) -> Iterator[Batch]:
    """Return batches of a data set that fits into memory, mean and variance of each channel about 0 and 1."""
    from crossbn.lab.data.memory import Scaling

    if name == "digits":
        require("sklearn")
    else:
        require("numpy", "PIL", extra="train")
    images, classes = load_pictures(name, train=True, folder=spec.folder)
    scaling = Scaling.of(images)

    def draw(chosen: Tensor) -> Batch:
        pixels = (images[chosen].float() - scaling.mean) / scaling.std
        if pixels.shape[-1] != spec.size:
            pixels = F.interpolate(pixels, (spec.size, spec.size), mode="bilinear", align_corners=False, antialias=True)
        return _adapt(pixels, spec.channels), classes[chosen]

    return _drawn(len(classes), spec, draw)


def _files(folder: Path, spec: BatchSpec) -> Iterator[Batch]:
    """Return batches of images in files, the shorter side resized and the centre taken, read as they are needed."""
    require("torchvision", extra="train")
    from crossbn.lab.data.drawing import Draw
    from crossbn.lab.data.folders import FolderImages

    files = FolderImages(folder, spec.size, augment=False)

    def draw(chosen: Tensor) -> Batch:
        pixels, classes = files[Draw(chosen, 0)]
        return _adapt(pixels, spec.channels), classes

    return _drawn(len(files), spec, draw)


def _adapt(pixels: Tensor, channels: int) -> Tensor:
    if pixels.shape[1] == channels:
        return pixels
    return pixels.mean(1, keepdim=True) if channels == 1 else pixels.repeat(1, channels, 1, 1)


def _drawn(images: int, spec: BatchSpec, draw: Callable[[Tensor], Batch]) -> Iterator[Batch]:
    generator = spec.generator
    while True:
        yield draw(torch.randint(images, (spec.batch_size,), generator=generator))


def _own(name: str, make: Callable[[], Any], seed: int) -> Iterator[Batch]:
    """Yield the batches of a function of one's own, again and again."""
    torch.manual_seed(seed)  # a DataLoader shuffles by the process's random numbers
    batches = _iterable(name, make())
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield _checked(name, batch)
        if empty:
            raise MistakeError(f"{name} yields no batch")
        if isinstance(batches, Iterator):
            batches = _iterable(name, make())


def _iterable(name: str, found: Any) -> Iterable[Any]:
    try:
        iter(found)
    except TypeError:
        raise MistakeError(f"{name} returns {_kind(found)}, which yields no batches: {_PAIR}") from None
    return found


def _checked(name: str, batch: Any) -> Batch:
    if not isinstance(batch, tuple | list):
        raise MistakeError(f"{name} yields {_kind(batch)}: {_PAIR}")
    if len(batch) != 2:
        raise MistakeError(f"{name} yields a {type(batch).__name__} of {len(batch)}: {_PAIR}")
    given, target = batch
    if isinstance(target, int | float) or (isinstance(target, Tensor) and not target.ndim):
        raise MistakeError(f"{name} yields single examples, with targets such as {target}: {_PAIR}")
    try:
        count_examples(Call((given,), {}))
    except BatchError:
        raise MistakeError(f"{name} yields inputs without a tensor, {_kind(given)}: {_PAIR}") from None
    return given, target


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
