import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn
from typer.testing import CliRunner

import crossbn.cli.diagnose as verb
from crossbn.analysis.fidelity_records import read_records
from crossbn.cli import extras, make_app
from crossbn.conversion_report import ConversionReport
from crossbn.convert import convert_
from crossbn.nn import CrossIterBatchNorm, Settings

TINY = ("diagnose", "--model", "tests.cli.test_diagnose:tiny", "--image-size", "8", "--channels", "1")
SHORT = ("--batch-size", "4", "--window", "3", "--steps", "8", "--every", "4")


def tiny() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 10),
        nn.BatchNorm1d(10),
    )


def without_norms() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Answer(NamedTuple):
    status: int
    output: str
    errors: str


def call(*words: str | Path) -> Answer:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(make_app(), [str(word) for word in words])
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.mark.parametrize("data", verb.DATA)
def test_measures_and_writes(data: str, tmp_path: Path) -> None:
    answer = call(*TINY, *SHORT, "--data", data, "--output", tmp_path)
    assert answer.status == 0, answer.errors
    records = read_records(tmp_path / "records.jsonl")
    assert {(r.step, r.layer, r.age, r.truth) for r in records} == {
        (step, layer, age, truth)
        for step in (4, 8)
        for layer in ("1", "5")
        for age in (1, 2)
        for truth in ("same layer", "whole network")
    }
    page = (tmp_path / "table.md").read_text(encoding="utf-8")
    sentence = page.splitlines()[0]
    assert sentence.startswith("Window ")
    for text in (page, re.sub(r"\s+", " ", answer.output)):
        assert sentence in text
        assert "2 measurements." in text
        assert "batch size 4, window 3" in text
    assert page.count("### ") == 3
    assert re.search(r"\| 1 \| \d+\.\d → \d+\.\d \|", page)
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "context.json").read_text())["data"] == f"{data} 1x8x8"


def test_the_same_command_finds_the_same(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        call(*TINY, *SHORT, "--seed", "3", "--output", tmp_path / name)
        found.append((tmp_path / name / "records.jsonl").read_text())
    assert found[0] == found[1]
    call(*TINY, *SHORT, "--output", tmp_path / "a")
    assert (tmp_path / "a" / "records.jsonl").read_text() != found[0]


def test_settings_reach_the_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def convert(model: nn.Module, **settings: Any) -> ConversionReport:
        report = convert_(model, **settings)
        seen.extend(norm.settings for norm in model.modules() if isinstance(norm, CrossIterBatchNorm))
        return report

    monkeypatch.setattr(verb, "convert_", convert)
    words = (
        "--burn-in",
        "3",
        "--order",
        "2",
        "--positions",
        "0",
        "--batch-size",
        "2",
        "--steps",
        "10",
        "--every",
        "10",
    )
    answer = call(*TINY, *words, "--data", "random", "--output", tmp_path)
    assert answer.status == 0, answer.errors
    assert seen == 2 * [Settings(window=8, burn_in=3, order=2, positions=None)]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "nowhere:net"], "there is no module 'nowhere'"),
        (["--model", "resnet"], "torchvision has no classification model 'resnet'"),
        (["--data", "faces"], "there is no data 'faces', there is digits, random"),
        (["--window", "1"], "--window"),
        (["--order", "3"], "--order"),
        (["--steps", "10", "--every", "20"], "no measurement: 10 steps, one every 20"),
        (["--output", __file__], "--output"),
    ],
)
def test_usage_errors(words: list[str], complaint: str) -> None:
    answer = call("diagnose", *words)
    assert (answer.status, answer.output) == (2, "")
    assert complaint in answer.errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--channels", "2"], "the model does not run with images (4, 2, 8, 8): "),
        (["--model", "tests.cli.test_diagnose:without_norms"], "no BatchNorm that can be converted"),
        (["--burn-in", "100"], "no step was remembered"),
    ],
)
def test_other_mistakes_end_with_a_sentence(words: list[str], complaint: str, tmp_path: Path) -> None:
    answer = call(*TINY, *SHORT, *words, "--output", tmp_path)
    assert (answer.status, answer.output) == (1, "")
    assert answer.errors.splitlines()[-1].startswith("crossbn: ")
    assert complaint in answer.errors.splitlines()[-1]


def test_interruption_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verb._random

    def interrupted(*facts: int, **more: object) -> verb.Images:
        for step, images in enumerate(real(*facts, **more)):  # type: ignore[arg-type]
            if step == 7:
                raise KeyboardInterrupt
            yield images

    monkeypatch.setattr(verb, "_random", interrupted)
    answer = call(*TINY, *SHORT, "--data", "random", "--output", tmp_path)
    assert answer.status == 1
    assert answer.errors.endswith(f"interrupted; {tmp_path / 'records.jsonl'} has what was measured until then\n")
    assert {record.step for record in read_records(tmp_path / "records.jsonl")} == {4}


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "matplotlib" else name)
    answer = call(*TINY, "--output", tmp_path / "results")
    assert answer.status == 1
    assert "needs matplotlib: pip install 'crossbn[demo]'" in answer.output
