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
from crossbn.cli.mistakes import MistakeError
from crossbn.cli.named import find_function
from crossbn.lab.data import DATASETS, imagenet_folder, load_pictures
from crossbn.lab.fidelity.batches import BatchError, Call, count_examples

RANDOM = "random"
NAMES = (*(name for name in DATASETS if name != "imagenet"), "imagenet", RANDOM)
_RANDOM_CLASSES = 10
_PAIR = "a batch is a pair of input and target, as a DataLoader has it"

Batch = tuple[Any, Any]
"""What the model is called with, and what the loss compares its output with."""


@dataclass(frozen=True)
class Wish:
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


def find_batches(data: str, wish: Wish) -> Iterator[Batch]:
    """Return batches without end.

    Args:
        data: one of `NAMES`, or `package.module:function` for a function without arguments that returns an iterable
            of pairs of input and target; it is gone through again, or made again if it is an iterator, when it ends.
        wish: what batches shall be like.

    Raises:
        typer.BadParameter: if there is no such data, or not with as many channels.
        DataError: if a data set is missing or damaged.
        MistakeError: when they are gone through, if a function of one's own yields something else.
    """
    if ":" in data:
        return _own(data, find_function(data, "--data", arguments=0), wish.seed)
    if data not in NAMES:
        known = f"there is {', '.join(NAMES)}, and package.module:function for your own"
        raise typer.BadParameter(f"there is no data {data!r}; {known}", param_hint="--data")
    if data == RANDOM:
        return _noise(wish)
    own = DATASETS[data].channels
    if own > 1 and wish.channels not in (1, own):
        problem = f"the images of {data} have {own} channels, which can be made 1, not {wish.channels}"
        raise typer.BadParameter(problem, param_hint="--channels")
    return _imagenet(wish) if data == "imagenet" else _pictures(data, wish)


def _noise(wish: Wish) -> Iterator[Batch]:
    """Yield batches of noise, labelled at random."""
    generator = wish.generator
    while True:
        images = torch.randn(wish.batch_size, wish.channels, wish.size, wish.size, generator=generator)
        yield images, torch.randint(_RANDOM_CLASSES, (wish.batch_size,), generator=generator)


def _pictures(name: str, wish: Wish) -> Iterator[Batch]:
    """Return batches of a data set that fits into memory, mean and variance of each channel about 0 and 1."""
    from crossbn.lab.recipes.classification.images import Scaling

    if name == "digits":
        require("sklearn")
    else:
        require("numpy", "PIL", extra="vision")
    images, classes = load_pictures(name, train=True, folder=wish.folder)
    scaling = Scaling.of(images)

    def draw(chosen: Tensor) -> Batch:
        pixels = (images[chosen].float() - scaling.mean) / scaling.std
        if pixels.shape[-1] != wish.size:
            pixels = F.interpolate(pixels, (wish.size, wish.size), mode="bilinear", align_corners=False, antialias=True)
        return _adapt(pixels, wish.channels), classes[chosen]

    return _drawn(len(classes), wish, draw)


def _imagenet(wish: Wish) -> Iterator[Batch]:
    """Return batches of ImageNet's images, the shorter side resized and the centre taken, read as they are needed."""
    require("torchvision", extra="vision")
    from crossbn.lab.recipes.classification.folders import FolderImages
    from crossbn.lab.recipes.classification.order import Draw

    files = FolderImages(imagenet_folder(train=True, folder=wish.folder), wish.size, augment=False)

    def draw(chosen: Tensor) -> Batch:
        pixels, classes = files[Draw(chosen, 0)]
        return _adapt(pixels, wish.channels), classes

    return _drawn(len(files), wish, draw)


def _adapt(pixels: Tensor, channels: int) -> Tensor:
    if pixels.shape[1] == channels:
        return pixels
    return pixels.mean(1, keepdim=True) if channels == 1 else pixels.repeat(1, channels, 1, 1)


def _drawn(images: int, wish: Wish, draw: Callable[[Tensor], Batch]) -> Iterator[Batch]:
    generator = wish.generator
    while True:
        yield draw(torch.randint(images, (wish.batch_size,), generator=generator))


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
