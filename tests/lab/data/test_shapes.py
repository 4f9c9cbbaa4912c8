"""Drawn scenes."""

import torch

from crossbn.lab.data.shapes import CLASSES, ShapeScenes


def test_equal_numbers_are_equal_scenes_and_parts_share_none() -> None:
    first, again = (ShapeScenes("train", 8).load(3, masks=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None and b is not None)
    others = [ShapeScenes("val", 8), ShapeScenes("train", 8, seed=1)]
    assert not any(
        torch.equal(each.load(3, masks=False).image[:, :99, :99], first.image[:, :99, :99]) for each in others
    )


def test_boxes_and_areas_are_those_of_masks_which_share_no_pixel() -> None:
    scenes = ShapeScenes("train", 30)
    labels, overlapping = set(), 0
    for number in range(30):
        scene = scenes.load(number, masks=True)
        assert scene.masks is not None
        assert len(scene.boxes) >= 1
        assert int(scene.masks.sum(0).max()) == 1
        for mask, box, area in zip(scene.masks, scene.boxes.tolist(), scene.areas, strict=True):
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            assert box == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert area == mask.sum()
        left, right = scene.boxes[:, None], scene.boxes[None]
        sides = (torch.minimum(left, right)[..., 2:] - torch.maximum(left, right)[..., :2]).clamp(min=0)
        overlapping += int((sides.prod(-1) > 0).sum()) - len(scene.boxes)
        labels |= set(scene.labels.tolist())
    assert labels == set(range(1, len(CLASSES) + 1))
    assert overlapping > 10
    assert len({tuple(scenes.load(number, masks=False).image.shape) for number in range(9)}) > 1
