import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crossbn.lab.data import DATASETS, DataError, Pictures, imagenet_folder, load_pictures, names_of
from crossbn.lab.experiments.pictures import load_digits
from tests.lab.data.conftest import Places

FACTS = {
    "imagenet": (1000, 3, 224, 1_281_167, 50_000),
    "cifar10": (10, 3, 32, 50_000, 10_000),
    "cifar100": (100, 3, 32, 50_000, 10_000),
    "fashion_mnist": (10, 1, 28, 60_000, 10_000),
    "digits": (10, 1, 8, 1000, 797),
    "coco": (80, 3, 800, 118_287, 5000),
    "shapes": (3, 3, 128, 1000, 200),
}


def test_what_is_known() -> None:
    assert list(DATASETS) == list(FACTS)
    for name, each in DATASETS.items():
        facts = (each.classes, each.channels, each.image_size, each.train_images, each.test_images)
        assert (each.name, facts) == (name, FACTS[name])
        assert each.origin


def test_every_file_of_a_source_has_a_checksum() -> None:
    for dataset in DATASETS.values():
        for source in dataset.sources:
            assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in source.sha256.values())
    files = {name: [len(source.sha256) for source in each.sources] for name, each in DATASETS.items()}
    expected = {"cifar10": [1, 8], "cifar100": [1], "fashion_mnist": [4, 4, 4]}
    assert {name: counts for name, counts in files.items() if counts} == expected


def test_kinds() -> None:
    assert names_of("pictures") == ["cifar10", "cifar100", "fashion_mnist", "digits"]
    assert names_of("folders", "scenes") == ["imagenet", "coco", "shapes"]


def test_checksum_is_of_content() -> None:
    images = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)
    pictures = Pictures(images, torch.tensor([3, 1]))
    moved = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # the same in another order in memory
    assert Pictures(moved, pictures.classes).sha256 == pictures.sha256
    assert Pictures(images, torch.tensor([3, 2])).sha256 != pictures.sha256
    assert Pictures(images.flip(0), pictures.classes).sha256 != pictures.sha256


@pytest.mark.parametrize("train", [True, False])
def test_digits_are_those_of_the_experiments(train: bool) -> None:
    pictures = load_pictures("digits", train)
    pixels, digits = load_digits(train)
    assert pictures.images.shape == DATASETS["digits"].shape(train)
    assert pictures.sha256 == DATASETS["digits"].sha256(train)
    assert torch.equal(pictures.classes, digits)
    assert (pictures.images / 255 - pixels).abs().max() < 0.5 / 255 + 1e-6
    assert [bound.item() for bound in pictures.images.aminmax()] == [0, 255]


@pytest.fixture
def _two_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "imagenet", replace(DATASETS["imagenet"], classes=2))


def make_classes(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"class{number}").mkdir(parents=True)
    (folder / "notes.txt").write_text("no class")


@pytest.mark.usefixtures("_two_classes")
def test_imagenet_is_found(places: Places, tmp_path: Path) -> None:
    for part in ("train", "val"):
        make_classes(places.folder / "imagenet" / part, 2)
        make_classes(tmp_path / "other" / part, 2)
    assert imagenet_folder(train=True) == places.folder / "imagenet" / "train"
    assert imagenet_folder(train=False) == places.folder / "imagenet" / "val"
    assert imagenet_folder(True, tmp_path / "other") == tmp_path / "other" / "train"


@pytest.mark.usefixtures("_two_classes")
def test_imagenet_is_not_found(places: Places) -> None:
    make_classes(places.folder / "train", 3)  # of something else
    place = places.folder / "imagenet" / "train"
    with pytest.raises(DataError, match=f"ImageNet is not in {place}: put a folder .* --data-folder or CROSSBN_DATA"):
        imagenet_folder(train=True)
    make_classes(place, 1)
    with pytest.raises(DataError, match=f"{place} has 1 classes in place of ImageNet's 2"):
        imagenet_folder(train=True)


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="digits come with scikit-learn, which is not installed"):
        load_pictures("digits", train=True)
