"""Files of annotations in COCO's format: finding them, and looking through them before anything is trained."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossbn.lab.data.dataset import DataError

# A file is looked for under these names, for "train" and "val", in this order.
_FILES = ("instances_{}*.json", "annotations/instances_{}*.json", "{}*/_annotations.coco.json")
_ID = int | str
_LARGEST = 3e38  # of what float32 holds, which boxes become


def find_annotations(folder: Path, part: str) -> Path:
    """Return the file of annotations of a part.

    Raises:
        DataError: if there is none, or more than one.
    """
    for pattern in _FILES:
        found = sorted(folder.glob(pattern.format(part)))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(str(each.relative_to(folder)) for each in found)
            raise DataError(f"{folder} has several files of annotations for {part!r}, {names}: leave one")
    looked = ", ".join(pattern.format(part) for pattern in _FILES)
    raise DataError(f"{folder} has no COCO annotations for {part!r}, which are looked for as {looked}")


def read_annotations(path: Path) -> dict[str, Any]:
    """Return what a file of annotations holds.

    Raises:
        DataError: if it is not in COCO's format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    for name in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(name), list):
            raise DataError(f"{path} is not in COCO's format: it has no list {name!r}")
    if not content["images"] or not content["categories"]:
        raise DataError(f"{path} has no images or no categories")
    return content


def check_annotations(content: Mapping[str, Any], path: Path, masks: bool) -> None:
    """Look through all annotations of a file.

    Raises:
        DataError: at the first thing that is wrong; the sentence names the image.
    """
    images, categories = (_by_id(content[name], path, name) for name in ("images", "categories"))
    for image in images.values():
        if problem := _image_problem(image):
            raise DataError(f"{path}: the image {_name(image)} {problem}")
    for category in categories.values():
        if "name" not in category:
            raise DataError(f"{path}: the category with id {category['id']!r} has no 'name'")
    for number, annotation in enumerate(content["annotations"]):
        if not isinstance(annotation, dict):
            raise DataError(f"{path}: entry {number} of 'annotations' is no object, but {annotation!r:.50}")
        image_id = annotation.get("image_id")
        told = f"annotation {annotation['id']!r}" if "id" in annotation else f"entry {number} of 'annotations'"
        if not isinstance(image_id, _ID) or image_id not in images:
            raise DataError(f"{path}: {told} is of the image with id {image_id!r}, which the file lacks")
        if problem := _annotation_problem(annotation, images[image_id], categories, masks):
            raise DataError(f"{path}: {told} of the image {_name(images[image_id])} {problem}")


def _by_id(entries: list[Any], path: Path, name: str) -> dict[Any, Mapping[str, Any]]:
    """Return images or categories by their ids, which are all numbers or all texts, and each there once."""
    found: dict[Any, Mapping[str, Any]] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{path}: entry {number} of {name!r} is no object, but {entry!r:.50}")
        key = entry.get("id")
        if not isinstance(key, _ID):
            raise DataError(f"{path}: {_name(entry)} of {name!r} has an id that is neither number nor text, {key!r}")
        if key in found:
            raise DataError(f"{path}: {_name(found[key])} and {_name(entry)} of {name!r} have the same id")
        if found and type(key) is not type(next(iter(found))):
            raise DataError(f"{path}: the ids of {name!r} are numbers and texts, {_name(entry)} has {key!r}")
        found[key] = entry
    return found


def _name(entry: Mapping[str, Any]) -> str:
    return repr(entry.get("file_name", entry.get("name", f"with id {entry.get('id')!r}")))


def _image_problem(image: Mapping[str, Any]) -> str:
    missing = [name for name in ("file_name", "width", "height") if name not in image]
    if missing:
        return f"has no {missing[0]!r}"
    if not isinstance(image["file_name"], str):
        return "has a file_name that is no text"
    if not all(isinstance(image[name], int) and image[name] > 0 for name in ("width", "height")):
        return f"has a size of {image['width']!r} by {image['height']!r}"
    return ""


def _annotation_problem(
    annotation: Mapping[str, Any], image: Mapping[str, Any], categories: Mapping[Any, Any], masks: bool
) -> str:
    if not isinstance(annotation.get("id"), _ID):
        return f"has an id that is neither number nor text, {annotation.get('id')!r}"
    category = annotation.get("category_id")
    if not isinstance(category, _ID) or category not in categories:
        return f"is of category {category!r}, which the file lacks"
    box = annotation.get("bbox")
    if not (isinstance(box, list) and len(box) == 4 and all(_is_finite(each) for each in box)):
        return f"has a box that is not four finite numbers, {box!r}"
    if not _is_finite(annotation.get("area", 0)):
        return f"has an area that is no finite number, {annotation['area']!r}"
    if masks:
        return _mask_problem(annotation.get("segmentation"), image)
    return ""


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _mask_problem(mask: Any, image: Mapping[str, Any]) -> str:
    """Return what is wrong with a mask: polygons, or runs of pixels, compressed or not."""
    if not mask:
        return "has no mask, which the model needs"
    if isinstance(mask, list):
        wrong = [each for each in mask if not isinstance(each, list) or len(each) < 6 or len(each) % 2]
        if wrong or not all(_is_finite(number) for polygon in mask for number in polygon):
            return "has a mask with a polygon that is not three or more finite points"
        return ""
    if not isinstance(mask, dict) or mask.get("size") != [image["height"], image["width"]]:
        size = mask.get("size") if isinstance(mask, dict) else None
        return f"has a mask of size {size!r}, where the image has [{image['height']}, {image['width']}]"
    return "" if _is_decodable(mask) else "has a mask whose runs cannot be decoded"


def _is_decodable(mask: Mapping[str, Any]) -> bool:
    counts, (height, width) = mask.get("counts"), mask["size"]
    try:
        if isinstance(counts, list):
            whole = all(isinstance(count, int) and count >= 0 for count in counts)
            return whole and sum(counts) == height * width
        if not isinstance(counts, str):
            return False
        return bool(decode({"size": mask["size"], "counts": counts.encode()}).shape == (height, width))
    except (ValueError, TypeError, OverflowError):
        return False


def decode(mask: Mapping[str, Any]) -> Any:
    """Return the array [H, W] of a mask that is given as compressed runs of pixels, 1 where the object is."""
    from pycocotools import mask as codec

    with warnings.catch_warnings():
        # It makes its array in a way that numpy 2 will not know for ever.
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        return codec.decode(mask)
