"""COCO's scores, and that crowds do not count."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossbn.lab.recipes.detection.recipe import SCORES
from crossbn.lab.recipes.detection.scores import ScoreKeeper


def boxes(*corners: tuple[float, float, float, float]) -> Tensor:
    return torch.tensor(corners).reshape(-1, 4)


def found(where: Tensor, scores: list[float]) -> dict[str, Any]:
    return {"boxes": where, "labels": torch.ones(len(where), dtype=torch.int64), "scores": torch.tensor(scores)}


def there(where: Tensor, crowds: list[int]) -> dict[str, Any]:
    sides = where[:, 2:] - where[:, :2]
    labels = torch.ones(len(where), dtype=torch.int64)
    return {"boxes": where, "labels": labels, "iscrowd": torch.tensor(crowds), "area": sides.prod(1)}


def test_half_of_the_objects_found_is_half_the_score() -> None:
    keeper = ScoreKeeper(masks=False)
    one, other = (0.0, 0.0, 20.0, 20.0), (40.0, 40.0, 100.0, 100.0)
    keeper.add([found(boxes(one), [0.9])], [there(boxes(one, other), [0, 0])])
    scores = keeper.scores()
    assert tuple(scores) == SCORES
    expected = 51 / 101  # of COCO's points of recall, 0 to 0.5
    assert scores["AP"] == scores["AP50"] == pytest.approx(expected)
    assert (scores["APs"], scores["APm"], scores["APl"]) == (1.0, 0.0, None)
    keeper.add([found(boxes(one, other), [0.9, 0.8])], [there(boxes(one, other), [0, 0])])
    assert keeper.scores()["AP"] == 1.0


def test_what_is_found_in_a_crowd_is_not_wrong() -> None:
    one, crowd = (0.0, 0.0, 20.0, 20.0), (40.0, 40.0, 100.0, 100.0)
    guess = found(boxes((45.0, 45.0, 60.0, 60.0), one), [0.95, 0.9])
    results = []
    for crowds in ([0, 1], [0, 0]):
        keeper = ScoreKeeper(masks=False)
        keeper.add([guess], [there(boxes(one, crowd), crowds)])
        results.append(keeper.scores()["AP"])
    assert results[0] == 1.0
    assert results[1] is not None
    assert results[1] < 0.5


def test_masks_are_scored_by_their_pixels() -> None:
    keeper = ScoreKeeper(masks=True)
    box = boxes((0.0, 0.0, 40.0, 40.0))
    whole, half = torch.zeros(1, 50, 50), torch.zeros(1, 50, 50)
    whole[:, :40, :40] = 1
    half[:, :40, :25] = 1  # an overlap of 0.625
    keeper.add([{**found(box, [0.9]), "masks": half[None]}], [{**there(box, [0]), "masks": whole.to(torch.uint8)}])
    scores = keeper.scores()
    assert (scores["AP"], scores["mask AP50"], scores["mask AP75"]) == (1.0, 1.0, 0.0)
    assert scores["mask AP"] == pytest.approx(0.3)  # 0.5, 0.55 and 0.6 of ten overlaps


def test_where_nothing_is_found_scores_are_0_and_not_missing() -> None:
    keeper = ScoreKeeper(masks=True)
    box = boxes((0.0, 0.0, 20.0, 20.0))
    masks = torch.ones(1, 50, 50, dtype=torch.uint8)
    nothing = {**found(box[:0], []), "masks": torch.zeros(0, 1, 50, 50)}
    keeper.add([nothing], [{**there(box, [0]), "masks": masks}])
    scores = keeper.scores()
    assert (scores["AP"], scores["mask AP"], scores["mask APs"], scores["mask APl"]) == (0.0, 0.0, 0.0, None)
