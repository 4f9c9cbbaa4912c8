"""Batches of data sets, adapted to what is wished for."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from crossbn.cli.batches import NAMES, BatchSpec, find_batches
from crossbn.lab.data import DATASETS, FOLDER_VARIABLE, load_pictures, names_of
from crossbn.lab.data.store import write_store
from crossbn.lab.records import read
from tests.cli.answers import call
from tests.lab.data.tiny import PICTURE_NAMES, make_parts, shrink, write_black_and_white

SPEC = BatchSpec(batch_size=5, channels=3, size=32, seed=0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny data sets that cannot be downloaded; returns where they are looked for."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "folder"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in PICTURE_NAMES:
        parts = make_parts(name)
        monkeypatch.setitem(DATASETS, name, shrink(name, parts, sources=()))
        write_store(tmp_path / "folder" / f"{name}.npz", parts)
    monkeypatch.setitem(DATASETS, "imagenet", replace(DATASETS["imagenet"], classes=2))
    return tmp_path / "folder"


def test_every_data_set_has_a_name() -> None:
    assert {*NAMES} == {*names_of("pictures", "folders"), "random"}


def test_pictures_are_normalized_and_keep_their_classes() -> None:
    images, classes = load_pictures("cifar10", train=True)
    values = images.double()
    mean, std = values.mean((0, 2, 3), keepdim=True), values.std((0, 2, 3), correction=0, keepdim=True)
    known = {tuple(each.flatten()[:6].tolist()): i for i, each in enumerate(((values - mean) / std).float())}
    for pixels, targets in islice(find_batches("cifar10", SPEC), 3):
        assert pixels.shape == (5, 3, 32, 32)
        for image, target in zip(pixels, targets, strict=True):
            start = image.flatten()[:6]
            (found,) = [i for key, i in known.items() if torch.allclose(start, torch.tensor(key), atol=1e-4)]
            assert target == classes[found]


def test_grey_images_are_repeated_and_coloured_ones_averaged() -> None:
    grey, _ = next(find_batches("fashion_mnist", replace(SPEC, channels=2, size=28)))
    single, _ = next(find_batches("fashion_mnist", replace(SPEC, channels=1, size=28)))
    assert torch.equal(grey, torch.cat([single, single], 1))
    colour, _ = next(find_batches("cifar100", SPEC))
    averaged, _ = next(find_batches("cifar100", replace(SPEC, channels=1)))
    assert torch.allclose(averaged, (colour[:, :1] + colour[:, 1:2] + colour[:, 2:]) / 3, atol=1e-6)


def test_images_are_resized() -> None:
    whole, _ = next(find_batches("cifar10", SPEC))
    half, _ = next(find_batches("cifar10", replace(SPEC, size=16)))
    # Antialiased: a pixel inside is the average of 4 x 4 with the weights of a tent.
    tent = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    expected = torch.einsum("nchw,h,w->nc", whole[:, :, 5:9, 9:13], tent, tent)
    assert torch.allclose(half[:, :, 3, 5], expected, atol=1e-5)


def test_seed_decides_on_the_order() -> None:
    for name in ("digits", "random"):
        first, again, other = (next(find_batches(name, replace(SPEC, seed=seed)))[0] for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_imagenet_is_read_from_its_folder(folder: Path) -> None:
    write_black_and_white(folder / "imagenet" / "train", (40, 30))
    pixels, classes = next(find_batches("imagenet", replace(SPEC, batch_size=8)))
    assert {0, 1} == {*classes.tolist()}
    levels = torch.tensor(
        [[-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225], [0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225]]
    )
    assert torch.allclose(pixels, levels[classes].reshape(8, 3, 1, 1).expand(8, 3, 32, 32), atol=1e-4)


def broken(folder: Path) -> Iterator[tuple[str, str]]:
    (folder / "cifar10.npz").write_bytes(b"PK")
    yield "cifar10", f"crossbn: {folder / 'cifar10.npz'} is damaged or incomplete; remove it, then `crossbn data get "
    (folder / "cifar100.npz").unlink()
    yield "cifar100", f"crossbn: cifar100 is not in {folder} nor in "
    yield "imagenet", f"crossbn: ImageNet is not in {folder}/imagenet/train: "
    write_black_and_white(folder / "imagenet" / "train", (40, 30))
    for name in ("black", "white"):
        (folder / "imagenet" / "train" / name / "image.png").write_bytes(b"no picture")
    yield "imagenet", "crossbn: cannot identify image file "
    for name in ("black", "white"):
        (folder / "imagenet" / "train" / name / "image.png").unlink()
    yield "imagenet", "crossbn: Found no valid file for the classes black, white."


def test_missing_and_damaged_data_end_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    words = ["diagnose", "--model", "tests.cli.test_diagnose:tiny", "--output", str(tmp_path / "none"), "--data"]
    for name, complaint in broken(folder):
        answer = call(*words, name)
        assert (answer.status, answer.output) == (1, "")
        assert answer.errors.startswith(complaint)
        assert answer.errors.count("\n") == 1
        assert not (tmp_path / "none").exists()


def test_folder_can_be_named(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    words = ["diagnose", "--model", "tests.cli.test_diagnose:tiny", "--channels", "1", "--image-size", "8"]
    more = ["--data", "cifar10", "--data-folder", str(tmp_path / "elsewhere"), "--steps", "2"]
    answer = call(*words, *more, "--output", tmp_path / "results")
    assert answer.status == 0, answer.errors
    (record,) = read(tmp_path / "results" / "records.jsonl")
    assert (record.settings["data"], record.settings["input_shape"]) == ("cifar10", [1, 8, 8])


def test_a_folder_of_images_is_data(folder: Path) -> None:
    write_black_and_white(folder / "imagenet" / "train", (40, 30))
    for place in (folder / "imagenet", folder / "imagenet" / "train"):
        pixels, classes = next(find_batches(str(place), replace(SPEC, batch_size=8)))
        assert torch.equal(pixels[:, 0, 0, 0] > 0, classes == 1)  # white ones are of the second class
        assert pixels.shape == (8, 3, 32, 32)
