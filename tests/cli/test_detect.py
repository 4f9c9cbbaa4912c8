"""`crossbn train detect` and `crossbn predict`: what they print, write and refuse."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from crossbn.cli import make_app
from crossbn.compat import ensure_torchvision
from crossbn.lab import records
from tests.lab.recipes.detection.runs import annotations, write_folder

RUN = "train detect --backbone resnet18 --where all --batch-size 2 --image-size 64 --channels 8 --proposals 8"
SHORT = "--train-images 4 --test-images 2 --epochs 1 --lr 0.001"


def call(words: str, *more: str) -> Result:
    return CliRunner().invoke(make_app(), [*words.split(), *more])


def test_trains_goes_on_and_draws(tmp_path: Path) -> None:
    words = f"{RUN} {SHORT} --scales 48,56 --norm-option order=2 --output"
    done = call(words, str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    (record,) = records.read(tmp_path / "run" / "record.jsonl")
    told = record.settings
    assert (record.kind, told["norm_options"], told["scales"]) == ("detect", {"order": 2}, [48, 56])
    assert record.values["scores"] == record.values["curve"][-1]["scores"]
    assert "32 norms: 32 compensated, 0 pooled, 0 left alone" in done.stderr
    assert f"epoch 1: loss {record.values['curve'][0]['train_loss']:.3f}, AP " in done.stderr
    assert "on 2 test images after 1 epochs" in done.stdout
    assert "of the time waiting for images" in done.stdout
    assert "the run had been finished" in call(words, str(tmp_path / "run")).stderr
    Image.new("RGB", (60, 50), (10, 90, 200)).save(tmp_path / "some.png")
    drawn = call("predict", str(tmp_path / "run"), str(tmp_path / "some.png"), "--output", str(tmp_path / "drawn"))
    assert drawn.exit_code == 0, drawn.output
    assert "objects in 1 images" in drawn.stdout
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["objects.jsonl", "some.png"]


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ("--norm xn", 2, "there is no norm 'xn': "),
        (
            "--model no_such",
            2,
            "there is no model 'no_such': there are faster_rcnn, mask_rcnn, fasterrcnn_resnet50_fpn",
        ),
        ("--model fastr_rcnn", 2, "there is no model 'fastr_rcnn': did you mean faster_rcnn"),
        ("--model retinanet_resnet50_fpn_v2", 2, "backbone is of faster_rcnn and mask_rcnn: retinanet_resnet50_fpn_v2"),
        ("--norm bn --window 4", 2, "a window is of cbn and naive_cbn"),
        ("--scales 1,x", 2, "'1,x' is not whole numbers"),
        ("--norm none", 2, 'norm "none" is for heads'),
        ("--where heads", 1, 'where "heads" fixes the norms of the backbone'),
        ("--data no_such", 1, "there is no data set 'no_such'"),
        ("--data coco --data-folder {}", 1, "COCO is not in"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: str, status: int, sentence: str, tmp_path: Path) -> None:
    done = call(f"{RUN} {words.format(tmp_path)} --output", str(tmp_path / "run"))
    assert done.exit_code == status
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_broken_annotation_is_told_before_training(tmp_path: Path) -> None:
    content = annotations()
    content["annotations"][4]["bbox"] = [1, 2]
    done = call(f"{RUN} --data", str(write_folder(tmp_path / "data", content)), "--output", str(tmp_path / "run"))
    assert done.exit_code == 1
    assert "annotation 4 of the image 'high.png' has a box that is not four finite numbers" in " ".join(
        done.stderr.split()
    )
    assert not (tmp_path / "run" / "last.ckpt").exists()


def test_a_trained_backbone_is_found_frozen_and_its_statistics_are_spoken_of(tmp_path: Path) -> None:
    ensure_torchvision()
    from torchvision.models import resnet18

    weights = resnet18(weights=None).state_dict()
    torch.save(
        {name: each + 1 if "running" in name else each for name, each in weights.items()}, tmp_path / "resnet18.pth"
    )
    words = f"{RUN} {SHORT} --data-folder {tmp_path} --where heads --frozen-backbone --output"
    done = call(words, str(tmp_path / "heads"))
    assert done.exit_code == 0, done.output
    (record,) = records.read(tmp_path / "heads" / "record.jsonl")
    assert (record.settings["backbone_weights"], record.settings["frozen_backbone"]) == ("resnet18.pth", True)
    assert 'prior="running"' not in done.stderr  # the heads are new
    words = f"{RUN} {SHORT} --backbone-weights {tmp_path / 'resnet18.pth'} --norm-momentum 0.2 --output"
    done = call(words, str(tmp_path / "all"))
    assert 'prior="running"' in " ".join(done.stderr.split())


def test_predict_tells_what_is_missing(tmp_path: Path) -> None:
    done = call("predict", str(tmp_path), str(tmp_path / "some.png"))
    assert done.exit_code == 1
    assert "there is no checkpoint" in done.stderr
