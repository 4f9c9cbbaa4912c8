from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crossbn.lab.data import DATASETS, FOLDER_VARIABLE
from crossbn.lab.experiments.experiment import UnavailableError
from crossbn.lab.experiments.pictures import batches, batches_to_test, check_pictures, load_digits
from crossbn.lab.records import Task
from tests.lab.data.tiny import write_black_and_white


def test_no_digit_is_both_trained_on_and_tested_on() -> None:
    from sklearn.datasets import load_digits as load

    together = torch.cat([load_digits(train)[0] for train in (True, False)]).flatten(1)
    everything = torch.tensor(load().images, dtype=torch.float32).flatten(1) / 16
    # As many different images as there are at all: the two parts share none, and none is missing.
    assert together.shape == everything.shape
    assert torch.equal(together.unique(dim=0), everything.unique(dim=0))
    assert len(everything.unique(dim=0)) == 1000 + 797


def test_pixels_are_between_0_and_1_and_all_digits_occur() -> None:
    torch.manual_seed(1)
    pixels, digits = load_digits(train=True)
    assert [bound.item() for bound in pixels.aminmax()] == [0.0, 1.0]
    assert digits[:500].unique().tolist() == list(range(10))
    torch.manual_seed(2)
    assert torch.equal(load_digits(train=True)[0], pixels)


def test_digits_are_scaled_by_those_that_are_trained_on() -> None:
    images, _ = next(batches("digits", 8, 1000))
    assert images.shape == (1000, 3, 8, 8)
    assert (images.mean().item(), images.std().item()) == pytest.approx((0, 1), abs=1e-4)
    ((tested, _),) = batches_to_test("digits", 16)
    assert tested.shape == (797, 3, 16, 16)
    assert tested.min().item() == pytest.approx(images.min().item())


def test_imagenet_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setitem(DATASETS, "imagenet", replace(DATASETS["imagenet"], classes=2))
    tasks = [Task("layers", "BN", 0, {"data": "imagenet"})]
    check_pictures([Task("layers", "BN", 0, {"data": "digits"})])
    with pytest.raises(UnavailableError, match=f"ImageNet is not in {tmp_path}/imagenet/train"):
        check_pictures(tasks)
    write_black_and_white(tmp_path / "imagenet" / "train", (9, 7))
    check_pictures(tasks)
    with pytest.raises(UnavailableError, match=f"ImageNet is not in {tmp_path}/imagenet/val"):
        check_pictures(tasks, test=True)
    write_black_and_white(tmp_path / "imagenet" / "val", (9, 7))
    check_pictures(tasks, test=True)
    for images, classes in (next(batches("imagenet", 8, 2)), *batches_to_test("imagenet", 8)):
        assert images.shape == (2, 3, 8, 8)
        assert sorted(classes.tolist()) == [0, 1]
        assert images[classes.tolist().index(1)][0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229)
