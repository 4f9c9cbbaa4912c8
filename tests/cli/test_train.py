"""`crossbn train classify`: what it prints, writes and refuses."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from crossbn.cli import make_app
from crossbn.lab import records
from crossbn.lab.records import Record
from tests.processes import ended, interrupt, printed, start_command, wait_for

RUN = "train classify --data digits --model resnet8 --width 4 --epochs 2 --train-images 40 --test-images 30 --lr 0.02"


def read_record(folder: Path) -> Record:
    (record,) = records.read(folder / "record.jsonl")
    return record


def call(folder: Path, words: str = "") -> Result:
    return CliRunner().invoke(make_app(), [*RUN.split(), "--output", str(folder), *words.split()])


def test_prints_the_curve_and_the_result(tmp_path: Path) -> None:
    done = call(tmp_path, "--burn-in-epochs 0.5 --norm-option order=2 --points 1")
    assert done.exit_code == 0
    record = read_record(tmp_path)
    told = record.settings
    assert (told["norm"], told["norm_options"], told["burn_in_epochs"]) == ("cbn", {"order": 2}, 0.5)
    lines = done.stderr.splitlines()
    assert lines[:3] == [
        "9 norms: 9 compensated, 0 pooled, 0 left alone",
        "burn-in: BatchNorm for 5 forwards, then a window of 4",
        "burn-in ended after step 5: from now on a window of 4",
    ]
    (point,) = record.values["curve"]
    assert f"epoch 2: loss {point['train_loss']:.3f}" in done.stderr
    assert done.stdout.startswith(
        f"resnet8 with cbn at batch size 4: {record.values['accuracy']:.2%} of 30 test images after"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "last.ckpt", "log", "record.jsonl"]


def test_goes_on_or_begins_anew(tmp_path: Path) -> None:
    call(tmp_path, "--norm bn")
    again = call(tmp_path, "--norm bn")
    assert again.exit_code == 0
    assert "record.jsonl is there: the run had been finished, --fresh trains anew." in again.stderr
    (tmp_path / "record.jsonl").unlink()
    assert "last.ckpt is there: the run goes on from it." in call(tmp_path, "--norm bn").stderr
    other = call(tmp_path, "--norm gn")
    assert other.exit_code == 1
    assert "finished" not in other.stderr
    assert (
        "is of another run: norm 'bn', not 'gn'; --output names another directory, --fresh begins anew" in other.stderr
    )
    assert call(tmp_path, "--norm gn --norm-option groups=2 --fresh").exit_code == 0
    assert read_record(tmp_path).settings["norm_options"] == {"groups": 2}


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ("--norm cbm", 2, "there is no norm 'cbm': did you mean cbn"),
        ("--model no_such", 2, "there is no model 'no_such'"),
        ("--model resnt18", 2, "there is no model 'resnt18': did you mean resnet18"),
        ("--model alexnet", 2, "alexnet has no BatchNorm that a norm could take the place of"),
        ("--norm bn --window 4", 2, "a window is of cbn and naive_cbn, got norm 'bn' and window 4"),
        ("--norm bn --switch-norm cbn --switch-epoch 2", 2, "switch_epoch 2 is not before the end, after 2 epochs"),
        ("--norm-option foo=1", 2, "no option is called 'foo'; there are window, burn_in, order"),
        ("--norm-option order", 2, "'order' is not NAME=VALUE"),
        ("--batch-size 0", 2, "--batch-size"),
        ("--norm gn --norm-option no_such=1", 2, "Group Normalization: there is no option 'no_such': there are eps"),
        ("--norm bn --norm-option foo=1", 2, "Batch Normalization: there is no option 'foo': there are eps, momentum"),
        ("--norm ln --norm-option foo=1", 2, "Layer Normalization: there is no option 'foo': there are eps, momentum"),
        ("--norm gn --norm-option groups=3", 2, "the norm '1': 4 channels cannot be in 3 groups: give one of 1, 2, 4"),
        ("--window 1000000000", 2, "window must be at most 10000, got 1000000000"),
        ("--data cifar", 2, "there is no data set 'cifar': did you mean cifar10"),
        ("--norm bn --lr 1e30", 1, "the loss is not finite after"),
        ("--data imagenet --data-folder {}", 1, "ImageNet is not in"),
        ("--precision 31", 2, "there is no precision '31': there are 32, 64, bf16-mixed"),
        ("--norm bn --batch-size 1 --image-size 4", 1, "Batch Normalization has a single value per channel"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: str, status: int, sentence: str, tmp_path: Path) -> None:
    done = call(tmp_path / "run", words.format(tmp_path))
    assert done.exit_code == status
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    if status == 2 or "imagenet" in words:
        assert not (tmp_path / "run").exists()


def test_the_summary_tells_a_switch(tmp_path: Path) -> None:
    done = call(tmp_path, "--norm bn --switch-norm gn --switch-epoch 1")
    assert done.exit_code == 0, done.output
    assert "epoch 1: 9 norms are gn now, 0 left alone" in done.stderr
    assert done.stdout.startswith("resnet8 with bn, gn from epoch 1 on at batch size 4: ")


def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_networks.py").write_text(
        "from torch import nn\n"
        "def make(num_classes):\n"
        "    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)]\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = call(tmp_path / "run", "--model own_networks:make")
    assert done.exit_code == 0, done.output
    assert "1 norms: 1 compensated, 0 pooled, 0 left alone" in done.stderr
    assert done.stdout.startswith("own_networks:make with cbn at batch size 4: ")


def test_who_keeps_going_gets_a_record(tmp_path: Path) -> None:
    done = call(tmp_path, "--norm bn --lr 1e30 --keep-going")
    assert done.exit_code == 0, done.output
    assert "NaN" not in (tmp_path / "record.jsonl").read_text()
    assert read_record(tmp_path).values["curve"][-1]["train_loss"] is None


def test_a_damaged_record_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("{")
    done = call(tmp_path)
    assert done.exit_code == 1
    sentence = "record.jsonl is not a record of crossbn's: take the line out, or begin anew with --fresh"
    assert sentence in " ".join(done.stderr.split())
    assert not (tmp_path / "last.ckpt").exists()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with records.locked(tmp_path):
        done = call(tmp_path)
    assert done.exit_code == 1
    assert f"crossbn: another process works in {tmp_path}: wait for it, or take another --output" in done.stderr


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = [*RUN.split(), "--epochs", "6", "--output"]
    process = start_command(*words, tmp_path / "stopped", output=tmp_path / "printed")
    wait_for(tmp_path / "stopped" / "last.ckpt", process)
    interrupt(process)
    assert ended(process) == 130
    assert (
        printed(tmp_path / "printed")[1].splitlines()[-1]
        == f"crossbn: interrupted; the same command goes on from {tmp_path / 'stopped'}"
    )
    step = torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)["global_step"]
    assert 0 < step < 60
    for name in ("stopped", "straight"):
        assert ended(start_command(*words, tmp_path / name, output=tmp_path / "printed" / name)) == 0
    curves = [read_record(tmp_path / name).values["curve"] for name in ("stopped", "straight")]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 6
