"""A trained detector in use: what it finds in images, drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn.compat import ensure_torchvision
from crossbn.folding import fold
from crossbn.lab.data import DataError
from crossbn.lab.data.coco import read_image
from crossbn.lab.norm_names import CROSS_ITERATION
from crossbn.lab.recipes.detection.networks import build_network
from crossbn.lab.recipes.detection.norms import give_norm_
from crossbn.lab.recipes.detection.recipe import Recipe
from crossbn.lab.recipes.order import Plan
from crossbn.lab.recipes.recipe import RecipeError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_STATE = "detection"
# Of objects, one after the other; to be told apart on any ground, and by most who do not see all colours.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
_LEAST_DRAWN = 512  # pixels of the longer side, that a drawing has about
_ONCE = Plan(images=1, batch_size=1, accumulate=1, processes=1, epochs=1, points=None)


class Found(NamedTuple):
    """The objects that were found in an image, best first."""

    boxes: Tensor
    """[N, 4]: left, top, right, bottom, in pixels."""
    names: list[str]
    """Their classes."""
    scores: Tensor
    """[N], 0 to 1."""
    masks: Tensor | None
    """bool [N, H, W]; None if the detector finds boxes only."""


class Predictor:
    """A detector from the checkpoint of a training, its norms folded away at the first image.

    Args:
        path: of the checkpoint.
        score: the least of an object that counts.

    Raises:
        RecipeError: if it is no checkpoint of a detector.
    """

    def __init__(self, path: Path, score: float = 0.5) -> None:
        try:
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            state = saved[_STATE]
            told = {**json.loads(state["recipe"])}
        except Exception as error:  # torch raises whatever a file makes it stumble over
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise RecipeError(f"{path} is no checkpoint of a detector: {reason}") from error
        told.pop("processes")
        self.classes: list[str] = list(state["classes"])
        self.score = score
        recipe = _in_use(Recipe(**told), bool(state["switched"]))
        self.network = build_network(recipe, len(self.classes), trained=True)
        give_norm_(self.network, recipe, _ONCE)
        self.network.load_state_dict({_own_name(name): value for name, value in saved["state_dict"].items()})
        self.network.eval()
        self._folded: nn.Module | None = None

    @torch.no_grad()
    def find(self, image: Tensor) -> Found:
        """Return what is found in an image, uint8 [3, H, W]."""
        inputs = [image.float() / 255]
        if self._folded is None:
            self._folded = fold(self.network, (inputs,))
        (found,) = self._folded(inputs)
        chosen = found["scores"] >= self.score
        masks = found["masks"][chosen].squeeze(1) > 0.5 if "masks" in found else None
        names = [self.classes[label - 1] for label in found["labels"][chosen].tolist()]
        return Found(found["boxes"][chosen], names, found["scores"][chosen], masks)


def _in_use(recipe: Recipe, switched: bool) -> Recipe:
    """Return the recipe with the norm that its weights are of; norms that pool are BatchNorm in use."""
    norm, options = recipe.norm, recipe.norm_options
    unswitched: dict[str, Any] = {"switch_norm": None, "switch_epoch": 0.0, "switch_options": {}}
    if switched and recipe.switch_norm is not None:
        norm, options = recipe.switch_norm, recipe.switch_options
    if norm in (*CROSS_ITERATION, "sync_bn"):
        norm, options = "bn", {}
    return replace(recipe, norm=norm, norm_options=options, window=None, **unswitched)


def _own_name(name: str) -> str:
    return name.removeprefix("network.")


def draw(image: Tensor, found: Found) -> Tensor:
    """Return the image, uint8 [3, H, W], with boxes, names and masks drawn on it.

    Small images are enlarged by a whole number, so that the names can be read.
    """
    ensure_torchvision()
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    scale = max(1, _LEAST_DRAWN // max(image.shape[1:]))
    picture = _enlarge(image, scale)
    colours: list[Any] = [_COLOURS[number % len(_COLOURS)] for number in range(len(found.names))]
    if not colours:
        return picture
    if found.masks is not None:
        # One by one: where masks overlap, torchvision would draw black.
        for mask, colour in zip(_enlarge(found.masks, scale), colours, strict=True):
            picture = draw_segmentation_masks(picture, mask, alpha=0.4, colors=colour)
    labels = [f"{name} {score:.2f}" for name, score in zip(found.names, found.scores.tolist(), strict=True)]
    width = max(2, max(picture.shape[1:]) // 300)
    boxes = scale * found.boxes
    return draw_bounding_boxes(picture, boxes, labels, colours, width=width, label_colors="black", fill_labels=True)


def _enlarge(pixels: Tensor, scale: int) -> Tensor:
    return pixels.repeat_interleave(scale, dim=-1).repeat_interleave(scale, dim=-2)


def list_images(places: Sequence[Path]) -> list[Path]:
    """Return the images that are named, and those in the folders that are named.

    Raises:
        DataError: if a place is not there, or a folder has no images.
    """
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES)
            if not inside:
                raise DataError(f"{place} has no images: {', '.join(SUFFIXES)}")
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            raise DataError(f"there is no image or folder {place}")
    return found


def predict(checkpoint: Path, places: Sequence[Path], output: Path, score: float = 0.5) -> Iterator[tuple[Path, Found]]:
    """Draw what is found in images, and yield it: NAME.png for each, and objects.jsonl with a line for each.

    Raises:
        RecipeError: if there is no detector in the checkpoint.
        DataError: if an image is not there, or cannot be read.
    """
    from PIL import Image

    images = list_images(places)
    predictor = Predictor(checkpoint, score)
    output.mkdir(parents=True, exist_ok=True)
    with (output / "objects.jsonl").open("w", encoding="utf-8") as lines:
        for number, path in enumerate(images):
            image = read_image(path)
            found = predictor.find(image)
            taken = any(other.stem == path.stem for other in images[:number])
            name = f"{path.stem}-{number}.png" if taken else f"{path.stem}.png"
            Image.fromarray(draw(image, found).permute(1, 2, 0).numpy()).save(output / name)
            objects = zip(found.names, found.scores.tolist(), found.boxes.tolist(), strict=True)
            told = [{"class": kind, "score": round(own, 4), "box": box} for kind, own, box in objects]
            lines.write(json.dumps({"image": str(path), "drawn": name, "objects": told}) + "\n")
            yield path, found
