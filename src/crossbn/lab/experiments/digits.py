"""Handwritten digits, 8 by 8 pixels, that come with scikit-learn: real images and nothing to download."""

from typing import NamedTuple

from torch import Tensor

from crossbn.lab.data.digits import INK_LEVELS, TEST_IMAGES, TRAIN_IMAGES, read_digits

__all__ = ["TEST_IMAGES", "TRAIN_IMAGES", "Images", "load_digits"]


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
    if not 1 <= train_images <= TRAIN_IMAGES:
        raise ValueError(f"train_images must be between 1 and {TRAIN_IMAGES}, got {train_images}")
    ink, digits = read_digits()
    train, test = slice(train_images), slice(-TEST_IMAGES, None)
    pixels = ink.float() / INK_LEVELS
    return Images(pixels[train], digits[train]), Images(pixels[test], digits[test])
