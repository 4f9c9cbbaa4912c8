"""Data sets whose images are files, a folder for each class: ImageNet, or one's own; read as they are needed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from crossbn.compat import ensure_torchvision
from crossbn.lab.data.dataset import DataError
from crossbn.lab.data.drawing import Draw, choose

# The mean and standard deviation of ImageNet's training images that everybody uses.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FolderImages(Dataset[tuple[Tensor, Tensor]]):
    """Images in folders; an item is a whole batch, prepared.

    Augmentation is that of the Group Normalization paper: a crop of 8 to 100 % of the area, sides 3/4 to 4/3, resized,
    and mirrored half of the time (its jitter of colours is left out). Without, as for testing: the shorter side
    resized to 8/7 of the size, then the centre.

    Args:
        folder: with a folder for each class in it.
        size: height and width.
        augment: whether to.
        count: how many images, the first of a permutation that is always the same; None for all.
        threads: that read files; 0 for none beside the one that asks.

    Raises:
        DataError: if the folder has no images.
    """

    def __init__(self, folder: Path, size: int, augment: bool, count: int | None = None, threads: int = 0) -> None:
        ensure_torchvision()
        from torchvision.datasets import ImageFolder

        try:
            self.files = ImageFolder(folder)
        except FileNotFoundError as error:
            raise DataError(str(error).replace("\n", " ")) from error
        self.map: Any = ThreadPoolExecutor(threads).map if threads else map
        self.transform = _transform(size, augment)
        self.chosen = choose(len(self.files), count)

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, those of their folders."""
        return list(self.files.classes)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return images [N, 3, H, W], normalized, and classes [N]."""
        # torchvision takes the process's random numbers; seeded here, a batch is the same whichever worker makes it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw.seed)
            pairs = list(self.map(self.files.__getitem__, self.chosen[draw.images].tolist()))
            pixels = torch.stack([self.transform(image) for image, _ in pairs])
        return pixels, torch.tensor([label for _, label in pairs])


def _transform(size: int, augment: bool) -> Any:
    from torchvision.transforms import v2

    shape = (
        [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
        if augment
        else [v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)]
    )
    return v2.Compose([v2.ToImage(), *shape, v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)])
