"""A trained detector in use."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from crossbn.lab.data import DataError
from crossbn.lab.data.shapes import ShapeScenes
from crossbn.lab.recipes.detection import RecipeError, train
from crossbn.lab.recipes.detection.predicting import Found, Predictor, draw, list_images, predict
from tests.lab.recipes.detection.runs import SMALL


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(replace(SMALL, model="mask_rcnn", epochs=1), folder)
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = ShapeScenes("val", 1).load(0, masks=False).image
    (tmp_path / "images").mkdir()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "images" / "shapes.png")
    Image.new("L", (50, 40), 128).save(tmp_path / "images" / "grey.PNG")
    return tmp_path / "images" / "shapes.png"


def test_what_is_found_is_what_the_network_finds_unfolded(run: Path) -> None:
    predictor = Predictor(run / "last.ckpt", score=0.0)
    pixels = ShapeScenes("val", 1).load(0, masks=False).image
    found = predictor.find(pixels)
    with torch.no_grad():
        (expected,) = predictor.network([pixels.float() / 255])
    assert len(found.names) == len(expected["labels"]) > 0
    torch.testing.assert_close(found.scores, expected["scores"], rtol=1e-3, atol=1e-4)
    assert found.masks is not None
    assert found.masks.shape == (len(found.names), *pixels.shape[1:])
    assert Predictor(run / "last.ckpt", score=0.99).find(pixels).names == []


def test_weights_are_the_checkpoints(run: Path) -> None:
    saved = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    for name, value in Predictor(run / "last.ckpt").network.state_dict().items():
        assert torch.equal(value, saved[f"network.{name}"])


def test_drawings_and_objects(run: Path, image: Path, tmp_path: Path) -> None:
    done = list(predict(run / "last.ckpt", [image.parent, image], tmp_path / "out", score=0.0))
    assert [path.name for path, _ in done] == ["grey.PNG", "shapes.png", "shapes.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "grey.png",
        "objects.jsonl",
        "shapes-2.png",
        "shapes.png",
    ]
    with Image.open(tmp_path / "out" / "shapes.png") as drawn, Image.open(image) as given:
        assert drawn.size == (3 * given.width, 3 * given.height)  # up to 512 pixels
        assert drawn.tobytes() != given.resize(drawn.size, Image.Resampling.NEAREST).tobytes()
    lines = [json.loads(line) for line in (tmp_path / "out" / "objects.jsonl").read_text().splitlines()]
    assert [len(line["objects"]) for line in lines] == [len(found.names) for _, found in done]
    assert lines[1]["objects"][0]["class"] in ("ellipse", "rectangle", "triangle")


def test_boxes_and_masks_are_where_they_were_found() -> None:
    black = torch.zeros(3, 400, 600, dtype=torch.uint8)
    masks = torch.zeros(2, 400, 600, dtype=torch.bool)
    masks[0, 200:300, 200:400] = True
    masks[1, 250:350, 300:500] = True
    where = torch.tensor([[200.0, 200.0, 400.0, 300.0], [300.0, 250.0, 500.0, 350.0]])
    picture = draw(black, Found(where, ["x", "y"], torch.tensor([0.9, 0.8]), masks))
    for box in where.int().tolist():  # the corner where both are, too
        assert picture[:, box[1] : box[3], box[0] : box[2]].amax(0).min() > 0
    assert picture[:, 360:].sum() == 0
    empty = Found(torch.empty(0, 4), [], torch.empty(0), torch.empty(0, 400, 600, dtype=torch.bool))
    assert torch.equal(draw(black, empty), black)


def test_what_is_not_there_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no image or folder"):
        list_images([tmp_path / "no.png"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no images"):
        list_images([tmp_path / "empty"])
    with pytest.raises(RecipeError, match="is no checkpoint of a detector"):
        Predictor(run / "record.jsonl")
