"""What the command says at once: without torch, and after Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from crossbn import cli
from crossbn.cli import COMMANDS, make_app
from crossbn.lab import environment
from crossbn.lab.cost import Precision
from crossbn.lab.experiments import EXPERIMENTS, Scale
from crossbn.lab.experiments.demo import Demo
from crossbn.lab.fidelity import SAME_LAYER, WHOLE_NETWORK
from crossbn.lab.norm_names import NORM_NAMES
from crossbn.lab.recipes import classification, detection
from crossbn.lab.recipes.training import RECORD, record_of
from crossbn.lab.records import Record, Task, append
from crossbn.nn import NORMS
from tests.lab.cost.handmade import case, records
from tests.processes import ended, interrupt, printed, start_command, wait_for

HEAVY = ("torch", "lightning", "torchvision", "timm", "sklearn", "matplotlib")
LIGHT = (
    "import sys; from crossbn.cli import main; sys.argv = ['crossbn', *sys.argv[1:]]\n"
    f"try: main()\nfinally: print([each for each in {HEAVY} if each in sys.modules], file=sys.stderr)"
)


def call(*words: str) -> subprocess.CompletedProcess[str]:
    told = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run([sys.executable, "-c", LIGHT, *words], capture_output=True, text=True, check=False, env=told)


INNER = [("train", "classify"), ("train", "detect"), ("data", "list"), ("data", "get")]


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([*verb, "--help"] for verb in [*zip(COMMANDS), *INNER])], ids=" ".join
)
def test_help_waits_for_nothing(words: list[str]) -> None:
    done = call(*words)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert ("Usage: crossbn" if "--help" in words else "torch 2.") in done.stdout


def test_a_finished_measurement_waits_for_nothing(tmp_path: Path) -> None:
    sizes = {"input_shape": (3, 8, 8), "batch_size": 4, "window": 4}
    told = case(model="resnet18", **sizes, precision=Precision(6), threads=environment.usable_cores())
    append(tmp_path / "records.jsonl", [record.record() for record in records(told, cbn=1.25)])
    done = call("cost", "--image-size", "8", "--rounds", "6", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"1 of 1 cases are in {tmp_path / 'records.jsonl'} already.\n[]\n"
    assert "1.25 ± 0.01" in done.stdout


def test_a_finished_training_waits_for_nothing(tmp_path: Path) -> None:
    curve = (classification.Point(100.0, 0.5, 0.75, 0.625),)
    write(tmp_path, classification.Outcome(classification.Recipe(data="digits"), curve, 797, 60.0, 0.01))
    done = call("train", "classify", "--data", "digits", "--output", str(tmp_path))
    assert done.stderr == f"{tmp_path / RECORD} is there: the run had been finished, --fresh trains anew.\n[]\n"
    assert "62.50% of 797 test images" in done.stdout


def test_a_finished_detector_waits_for_nothing(tmp_path: Path) -> None:
    curve = (detection.Point(12.0, 0.5, {"AP": 0.375}),)
    write(tmp_path, detection.Outcome(detection.Recipe(norm="gn"), curve, 200, 60.0, 0.01))
    done = call("train", "detect", "--norm", "gn", "--output", str(tmp_path))
    assert done.stderr == f"{tmp_path / RECORD} is there: the run had been finished, --fresh trains anew.\n[]\n"
    assert "AP 37.5% on 200 test images" in done.stdout


def write(folder: Path, outcome: classification.Outcome | detection.Outcome) -> None:
    append(folder / RECORD, [record_of(outcome, 1, "cpu")])


def pretend(tasks: Iterable[Task], values: dict[str, Any]) -> list[Record]:
    return [Record(task.kind, task.name, task.seed, task.settings, {**values, "seconds": 60.0}) for task in tasks]


def test_a_finished_demo_waits_for_nothing(tmp_path: Path) -> None:
    curve = [{"epoch": 1.0, "test_accuracy": 0.5}]
    values = {"accuracy": 0.5, "curve": curve, "test_images": 797}
    append(tmp_path / "records.jsonl", pretend(Demo().configs(), values))
    words = ("demo", "--output", str(tmp_path))
    written = CliRunner().invoke(make_app(), words)
    assert written.exit_code == 0, written.stderr
    done = call(*words)
    assert done.stderr == f"12 of 12 runs are in {tmp_path / 'records.jsonl'} already.\n[]\n"
    assert done.stdout == written.stdout
    assert "CBN at batch 2, with a window of 8, classified 50.0%" in " ".join(done.stdout.split())


_ERRORS = {truth: {"naive": 0.2, "compensated": 0.1} for truth in (SAME_LAYER, WHOLE_NETWORK)}
_MOMENT = {"epoch": 1.0, "train_loss": 1.0, "train_accuracy": 0.5, "test_accuracy": 0.5}
REPRODUCED: dict[str, dict[str, Any]] = {
    "compensation": {"accuracy": 0.5, "curve": [_MOMENT], "test_images": 5000, "seconds_per_step": 0.01},
    "layers": {"accuracy": 0.5, "final_loss": 1.0, "seconds_per_step": 0.01},
    "gradients": {
        "looks": [{"step": step, "mean": [0.5, 0.25], "second_moment": [0.5, 0.25]} for step in (0, 50)],
        "final_loss": 1.0,
    },
    "sampling": {"samples": 16, "ages": [_ERRORS] * 3, "final_loss": 1.0},
    "coco_burn_in": {"scores": {"AP": 0.5}, "seconds_per_step": 0.01},
}
"""What runs of some tables might have found."""


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_finished_table_waits_for_nothing(name: str, tmp_path: Path) -> None:
    tasks = EXPERIMENTS[name].configs(Scale.SMALL)
    path = tmp_path / f"{tasks[0].kind}-small.jsonl"
    append(path, pretend(tasks, REPRODUCED[name]))
    words = ("reproduce", name, "--output", str(tmp_path))
    written = CliRunner().invoke(make_app(), words)
    assert written.exit_code == 0, written.stderr
    done = call(*words)
    assert done.stderr == f"{len(tasks)} of {len(tasks)} runs are in {path} already.\n[]\n"
    assert done.stdout == written.stdout


@pytest.mark.parametrize("name", ["batch_size", "finetune", "layers", "gradients", "sampling", "cost", "coco_norms"])
def test_a_dry_run_waits_for_nothing(name: str, tmp_path: Path) -> None:
    done = call("reproduce", name, "--dry-run", "--output", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "runs to do" in done.stdout


STEPS = ("--data", "random", "--image-size", "8", "--channels", "1", "--steps", "1000000")
LONG = {
    "cost": ("--model", "tests.lab.cost.handmade:tiny_network", "--image-size", "6", "--rounds", "1000000"),
    "diagnose": ("--model", "tests.cli.test_diagnose:tiny", *STEPS),
    "check": (),
    "demo": ("--epochs", "1000"),
    "reproduce": ("layers",),
    "train": ("classify", "--model", "resnet8", "--data", "digits", "--epochs", "1000", "--width", "4"),
}
"""Runs that do not end by themselves."""


@pytest.mark.slow
@pytest.mark.parametrize("verb", LONG)
def test_ctrl_c_ends_with_130(verb: str, tmp_path: Path) -> None:
    output = tmp_path / "results"
    process = start_command(verb, *LONG[verb], "--output", output, output=tmp_path / "printed")
    while verb == "check" and printed(tmp_path / "printed")[1] != "operators against the reference ...\n":
        assert process.is_alive()
        time.sleep(0.01)
    if verb != "check":
        wait_for(output, process)
    time.sleep(0.5)
    interrupt(process)
    status, (_, errors) = ended(process), printed(tmp_path / "printed")
    assert status == 130, errors
    assert "crossbn: interrupted" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_ctrl_c_while_modules_are_imported_ends_with_130(tmp_path: Path) -> None:
    # A process that a shell has put into the background ignores Ctrl-C.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + LIGHT
    words = [sys.executable, "-c", code, "train", *LONG["train"], "--output", str(tmp_path / "results")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as running:
        while not (tmp_path / "results").exists():
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors
    assert "crossbn: interrupted" in errors
    assert "Traceback" not in errors


def test_ctrl_c_before_the_command_listens_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "make_app", interrupted)
    with pytest.raises(SystemExit) as ended_with:
        cli.main()
    assert ended_with.value.code == 130
    assert capsys.readouterr().err == "crossbn: interrupted\n"


def test_help_is_in_groups() -> None:
    shown = CliRunner().invoke(make_app(), ["--help"]).stdout
    for panel in dict.fromkeys(panel for panel, _ in COMMANDS.values()):
        assert f"─ {panel} ─" in shown
    assert [verb for verb in COMMANDS if f"│ {verb} " not in shown] == []


def test_help_of_a_training_is_in_panels() -> None:
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(make_app(), ["train", "classify", "--help"]).stdout
    panels = {part.partition(" ")[0]: part for part in shown.split("╭─ ")[1:]}
    assert [*panels] == ["Options", "Norm", "Images", "Training", "Machine"]
    for panel, option in {
        "Norm": "--window",
        "Images": "--augment",
        "Training": "--lr",
        "Machine": "--devices",
    }.items():
        assert f"│ {option} " in panels[panel]


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_is_there(verb: str) -> None:
    done = CliRunner().invoke(make_app(), [verb, "--help"])
    assert done.exit_code == 0
    assert f"Usage: crossbn {verb} " in done.stdout.replace("root", "crossbn")


def test_a_misspelt_verb_is_guessed() -> None:
    done = CliRunner().invoke(make_app(), ["diganose"])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "Error: No such command 'diganose'. Did you mean 'diagnose'?"


def test_norms_are_those_of_the_library() -> None:
    assert tuple(NORMS) == NORM_NAMES
