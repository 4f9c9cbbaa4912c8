import pytest
import torch

from crossbn.lab.experiments.digits import TEST_IMAGES, TRAIN_IMAGES, load_digits


def test_no_image_is_both_trained_on_and_tested_on() -> None:
    from sklearn.datasets import load_digits as load

    train, test = load_digits(TRAIN_IMAGES)
    together = torch.cat([train.pixels, test.pixels]).flatten(1)
    everything = torch.tensor(load().images, dtype=torch.float32).flatten(1) / 16
    # As many different images as there are at all: the two parts share none, and none is missing.
    assert together.shape == everything.shape
    assert torch.equal(together.unique(dim=0), everything.unique(dim=0))
    assert len(everything.unique(dim=0)) == TRAIN_IMAGES + TEST_IMAGES


def test_split_is_the_same_whatever_the_seed_and_the_number_of_training_images() -> None:
    torch.manual_seed(1)
    few, test = load_digits(10)
    torch.manual_seed(2)
    many, same_test = load_digits(20)
    assert torch.equal(many.pixels[:10], few.pixels)
    assert torch.equal(many.digits[:10], few.digits)
    assert torch.equal(test.pixels, same_test.pixels)
    assert len(test.digits) == TEST_IMAGES


def test_pixels_are_between_0_and_1_and_all_digits_occur() -> None:
    train, _ = load_digits(500)
    assert [bound.item() for bound in train.pixels.aminmax()] == [0.0, 1.0]
    assert train.digits.unique().tolist() == list(range(10))


@pytest.mark.parametrize("images", [0, TRAIN_IMAGES + 1])
def test_refuses_images_that_are_not_there(images: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 1000, got {images}"):
        load_digits(images)
