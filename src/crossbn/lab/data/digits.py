"""Handwritten digits, 8 by 8 pixels, that come with scikit-learn: real images and nothing to download."""

from pathlib import Path

from crossbn.lab.data.dataset import DataError, DataSet, Pictures
from crossbn.lab.data.layouts import Found

INK_LEVELS = 16
"""A pixel of the file counts from 0 to this."""
TRAIN_IMAGES = 1000
TEST_IMAGES = 797


def read_digits() -> Pictures:
    """Return all images, pixels from 0 to 16, in the one order that every split is a piece of.

    The first 1000 are to train on, the last 797 to test on.

    Raises:
        DataError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # slow to import, and only needed here
    except ModuleNotFoundError as error:
        raise DataError("digits come with scikit-learn, which is not installed: pip install scikit-learn") from error
    import torch

    bunch = load_digits()
    # The file is ordered by writer; shuffled, both parts have some of everyone's.
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(bunch.images, dtype=torch.uint8).unsqueeze(1)
    return Pictures(pixels[order], torch.tensor(bunch.target)[order])


def find_digits(_: Path, dataset: DataSet) -> Found:
    """Return the data set as scikit-learn has it, whatever the folder."""
    return Found(dataset, Path("scikit-learn"), _read_part)


def _read_part(train: bool) -> Pictures:
    """Return a part of the images, pixels from 0 to 255."""
    pixels, digits = read_digits()
    part = slice(TRAIN_IMAGES) if train else slice(-TEST_IMAGES, None)
    scaled = (pixels[part].int() * 255 + INK_LEVELS // 2) // INK_LEVELS
    return Pictures(scaled.byte(), digits[part])
