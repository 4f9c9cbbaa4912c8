"""Batches of data sets, adapted to what is wished for."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from crossbn.cli import make_app
from crossbn.cli.batches import NAMES, Wish, find_batches
from crossbn.lab.data import DATASETS, FOLDER_VARIABLE, load_pictures
from crossbn.lab.data.store import write_store
from tests.lab.data.tiny import PICTURE_NAMES, make_parts, shrink

WISH = Wish(batch_size=5, channels=3, size=32, seed=0)


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


def write_imagenet(folder: Path) -> None:
    """Black images of one class and white ones of another."""
    for name, level in (("a", 0), ("b", 255)):
        (folder / "imagenet" / "train" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), (level,) * 3).save(folder / "imagenet" / "train" / name / "1.png")


def test_every_data_set_has_a_name() -> None:
    assert {*NAMES} == {*DATASETS, "random"}


def test_pictures_are_normalized_and_keep_their_classes() -> None:
    images, classes = load_pictures("cifar10", train=True)
    values = images.double()
    mean, std = values.mean((0, 2, 3), keepdim=True), values.std((0, 2, 3), correction=0, keepdim=True)
    known = {tuple(each.flatten()[:6].tolist()): i for i, each in enumerate(((values - mean) / std).float())}
    for pixels, targets in islice(find_batches("cifar10", WISH), 3):
        assert pixels.shape == (5, 3, 32, 32)
        for image, target in zip(pixels, targets, strict=True):
            start = image.flatten()[:6]
            (found,) = [i for key, i in known.items() if torch.allclose(start, torch.tensor(key), atol=1e-4)]
            assert target == classes[found]


def test_grey_images_are_repeated_and_coloured_ones_averaged() -> None:
    grey, _ = next(find_batches("fashion_mnist", replace(WISH, channels=2, size=28)))
    single, _ = next(find_batches("fashion_mnist", replace(WISH, channels=1, size=28)))
    assert torch.equal(grey, torch.cat([single, single], 1))
    colour, _ = next(find_batches("cifar100", WISH))
    averaged, _ = next(find_batches("cifar100", replace(WISH, channels=1)))
    assert torch.allclose(averaged, (colour[:, :1] + colour[:, 1:2] + colour[:, 2:]) / 3, atol=1e-6)


def test_images_are_resized() -> None:
    whole, _ = next(find_batches("cifar10", WISH))
    half, _ = next(find_batches("cifar10", replace(WISH, size=16)))
    # Antialiased: a pixel inside is the average of 4 x 4 with the weights of a tent.
    tent = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    expected = torch.einsum("nchw,h,w->nc", whole[:, :, 5:9, 9:13], tent, tent)
    assert torch.allclose(half[:, :, 3, 5], expected, atol=1e-5)


def test_seed_decides_on_the_order() -> None:
    for name in ("digits", "random"):
        first, again, other = (next(find_batches(name, replace(WISH, seed=seed)))[0] for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_imagenet_is_read_from_its_folder(folder: Path) -> None:
    write_imagenet(folder)
    pixels, classes = next(find_batches("imagenet", replace(WISH, batch_size=8)))
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
    write_imagenet(folder)
    for name in "ab":
        (folder / "imagenet" / "train" / name / "1.png").write_bytes(b"no picture")
    yield "imagenet", "crossbn: cannot identify image file "
    for name in "ab":
        (folder / "imagenet" / "train" / name / "1.png").unlink()
    yield "imagenet", "crossbn: Found no valid file for the classes a, b."


def test_missing_and_damaged_data_end_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    words = ["diagnose", "--model", "tests.cli.test_diagnose:tiny", "--output", str(tmp_path / "none"), "--data"]
    for name, complaint in broken(folder):
        result = CliRunner().invoke(make_app(), [*words, name])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(complaint)
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "none").exists()


def test_folder_can_be_named(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    words = ["diagnose", "--model", "tests.cli.test_diagnose:tiny", "--channels", "1", "--image-size", "8"]
    more = ["--data", "cifar10", "--data-folder", str(tmp_path / "elsewhere"), "--steps", "2"]
    result = CliRunner().invoke(make_app(), [*words, *more, "--output", str(tmp_path / "results")])
    assert result.exit_code == 0, result.stderr
    assert "cifar10 1x8x8" in (tmp_path / "results" / "context.json").read_text()
