"""Handwritten digits, 8 by 8 pixels, that come with scikit-learn: real images and nothing to download."""

from typing import NamedTuple

import torch
from torch import Tensor

TRAIN_IMAGES = 1000
TEST_IMAGES = 797


class Images(NamedTuple):
    """Pixels [N, 1, 8, 8], 0 to 1, and the digit each image shows [N]."""

    pixels: Tensor
    digits: Tensor


def load_digits(train_images: int) -> tuple[Images, Images]:
    """Return images to train on and images to test on.

    The split is the same on every call, whatever the seed of a run, and the test images are the same 797 however
    many there are to train on.

    Raises:
        ValueError: if there are not as many training images.
    """
    from sklearn.datasets import load_digits as load  # slow to import, and only needed here

    if not 1 <= train_images <= TRAIN_IMAGES:
        raise ValueError(f"train_images must be between 1 and {TRAIN_IMAGES}, got {train_images}")
    bunch = load()
    pixels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16  # they count from 0 to 16
    digits = torch.tensor(bunch.target)
    # The file is ordered by writer; shuffled, both parts have some of everyone's.
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    train, test = order[:train_images], order[-TEST_IMAGES:]
    return Images(pixels[train], digits[train]), Images(pixels[test], digits[test])
