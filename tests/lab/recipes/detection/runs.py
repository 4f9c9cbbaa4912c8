"""Small runs, and a small folder in COCO's format."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from crossbn.lab.recipes.detection import Machine, Outcome, Recipe, train

SMALL = Recipe(
    backbone="resnet18",
    where="all",
    batch_size=2,
    epochs=2,
    image_size=64,
    channels=8,
    proposals=8,
    train_images=8,
    test_images=3,
)
SIZES = {"wide.png": (40, 30), "high.png": (30, 50), "grey.png": (32, 32), "empty.png": (32, 24)}


def finish(recipe: Recipe, folder: Path) -> tuple[Outcome, dict[str, Any]]:
    """Train to the end; return what came of it and the last checkpoint."""
    outcome = train(recipe, folder, machine=Machine(workers=0))
    return outcome, torch.load(folder / "last.ckpt", weights_only=True)


def without_times(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint but for what differs between two runs that compute the same."""
    state = {name: each for name, each in checkpoint["detection"].items() if name not in _TIMES}
    return {**checkpoint, "detection": state}


_TIMES = ("seconds", "seconds_per_step", "times")


def annotations() -> dict[str, Any]:
    """Four images of different sizes: one grey, one without objects, one with a crowd and boxes without an inside."""
    images = [
        {"id": 10 + number, "file_name": name, "width": width, "height": height}
        for number, (name, (width, height)) in enumerate(SIZES.items())
    ]
    square = [[5.0, 5.0, 15.0, 5.0, 15.0, 15.0, 5.0, 15.0]]
    runs = {"size": [50, 30], "counts": [0, 500, 1000]}
    objects = [
        {"image_id": 10, "category_id": 7, "bbox": [5, 5, 10, 10], "area": 100, "segmentation": square},
        {"image_id": 10, "category_id": 7, "bbox": [20, 5, 0, 10], "area": 0, "segmentation": square},
        {"image_id": 10, "category_id": 7, "bbox": [35, -5, 20, 15], "area": 75, "segmentation": square},
        {"image_id": 11, "category_id": 3, "bbox": [0, 0, 10, 50], "area": 500, "iscrowd": 1, "segmentation": runs},
        {"image_id": 11, "category_id": 3, "bbox": [5, 5, 10, 10], "area": 100, "segmentation": square},
        {"image_id": 12, "category_id": 3, "bbox": [5, 5, 10, 10], "area": 100, "segmentation": square},
    ]
    return {
        "images": images,
        "annotations": [{"id": number, "iscrowd": 0, **each} for number, each in enumerate(objects)],
        "categories": [{"id": 7, "name": "round"}, {"id": 3, "name": "square"}],
    }


def write_folder(folder: Path, content: dict[str, Any] | None = None) -> Path:
    """Write a folder in COCO's format whose training and test images are the same; return it."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        kind = "L" if name == "grey.png" else "RGB"
        Image.new(kind, size, 100 if kind == "L" else (200, 100, 50)).save(folder / "images" / name)
    for part in ("train", "val"):
        (folder / f"instances_{part}.json").write_text(json.dumps(content or annotations()))
    return folder
