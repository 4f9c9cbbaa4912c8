"""`crossbn train classify`: what it prints, writes and refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from crossbn.cli import make_app

RUN = "train classify --data digits --model resnet8 --width 4 --epochs 2 --train-images 40 --test-images 30 --lr 0.02"


def call(folder: Path, words: str = "") -> Result:
    return CliRunner().invoke(make_app(), [*RUN.split(), "--output", str(folder), *words.split()])


def test_prints_the_curve_and_the_result(tmp_path: Path) -> None:
    done = call(tmp_path, "--burn-in-epochs 0.5 --norm-option order=2 --points 1")
    assert done.exit_code == 0
    record = json.loads((tmp_path / "record.jsonl").read_text())
    assert (record["norm"], record["norm_options"], record["burn_in_epochs"]) == ("cbn", {"order": 2}, 0.5)
    lines = done.stderr.splitlines()
    assert lines[:3] == [
        "9 norms: 9 compensated, 0 pooled, 0 left alone",
        "burn-in: BatchNorm for 5 forwards, then a window of 4",
        "burn-in ended after step 5: from now on a window of 4",
    ]
    (point,) = record["curve"]
    assert f"epoch 2: loss {point['train_loss']:.3f}" in done.stderr
    assert done.stdout.startswith(f"resnet8 with cbn at batch size 4: {record['accuracy']:.2%} of 30 test images after")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "log", "record.jsonl"]


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
    assert json.loads((tmp_path / "record.jsonl").read_text())["norm_options"] == {"groups": 2}


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ("--norm xn", 2, "norm must be one of bn, sync_bn"),
        ("--model no_such", 2, "there is no model 'no_such'"),
        ("--norm-option order", 2, "'order' is not NAME=VALUE"),
        ("--batch-size 0", 2, "--batch-size"),
        ("--norm gn --norm-option no_such=1", 1, "Group Normalization: "),
        ("--data no_such", 1, "there is no data set 'no_such'"),
        ("--data imagenet --data-folder {}", 1, "ImageNet is not in"),
        ("--precision 31", 1, "Precision '31' is invalid"),
        ("--norm bn --batch-size 1 --image-size 4", 1, "Batch Normalization has a single value per channel"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: str, status: int, sentence: str, tmp_path: Path) -> None:
    done = call(tmp_path / "run", words.format(tmp_path))
    assert done.exit_code == status
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    def start(folder: Path) -> subprocess.Popen[str]:
        words = [*RUN.split(), "--epochs", "12", "--output", str(folder)]
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("crossbn")), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Where the tests run in the background, a shell may have had them ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    process = start(tmp_path / "stopped")
    while not (tmp_path / "stopped" / "last.ckpt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 1
    assert told.splitlines()[-1] == f"crossbn: interrupted; the same command goes on from {tmp_path / 'stopped'}"
    step = torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)["global_step"]
    assert 0 < step < 120
    for name in ("stopped", "straight"):
        process = start(tmp_path / name)
        process.communicate()
        assert process.returncode == 0
    curves = [json.loads((tmp_path / name / "record.jsonl").read_text())["curve"] for name in ("stopped", "straight")]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 12
