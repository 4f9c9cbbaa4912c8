"""Folders of records as the commands leave them, with chosen numbers."""

import json
from pathlib import Path
from typing import Any

from crossbn.lab.cost.sweep import distinct, sweep
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.tasks import Result, Task
from crossbn.lab.fidelity import WHOLE_NETWORK, Fidelity, FidelityRecord
from crossbn.lab.fidelity.fidelity_records import SAME_LAYER
from crossbn.lab.records import append_lines
from tests.lab.cost import handmade as costs
from tests.lab.experiments import pretended
from tests.lab.experiments.handmade import three_norms

CURVE = ("epoch", "train_loss", "train_accuracy", "test_accuracy")


def training(norm: str, seed: int, *accuracies: float, **changes: Any) -> dict[str, Any]:
    """A line of `crossbn train`: test accuracy after each epoch, training a tenth better."""
    moments = [(1.0 + i, 2.0 - i / 2, share + 0.1, share) for i, share in enumerate(accuracies)]
    return {
        **{"data": "digits", "model": "resnet8", "norm": norm, "norm_options": {}, "window": None, "batch_size": 2},
        **{"learning_rate": None, "seed": seed, "processes": 1, "window_used": 8, "learning_rate_used": 0.00625},
        **{"accuracy": accuracies[-1], "curve": [dict(zip(CURVE, each, strict=True)) for each in moments]},
        **{"seconds": 60.0, "seconds_per_step": 0.01, "versions": {"crossbn": "0.1.0"}},
        **{"machine": {"processor": "abacus"}, "commit": "abc1234", **changes},
    }


def write_trainings(folder: Path) -> None:
    for norm, accuracies in {"bn": (0.40, 0.44), "cbn": (0.48, 0.50)}.items():
        for seed, accuracy in enumerate(accuracies):
            path = folder / f"{norm}-{seed}" / "record.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(training(norm, seed, 0.1, accuracy)) + "\n")


def result(task: Task, number: float, seconds: float = 90.0) -> Result:
    versions, machine = {"torch": "2.6"}, {"processor": "abacus"}
    return Result(task, {"number": number, "square": number**2}, seconds, versions, machine, "abc1234")


def write_results(path: Path, seeds: int = 2) -> None:
    """Of the experiment "pretended": one is 1 ± 0.71 and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks = pretended.configs(Scale.SMALL, seeds)
    # The other way round: files are in the order in which runs have finished.
    append_lines(path, [result(task, task.settings["number"] + task.seed) for task in reversed(tasks)])


def write_costs(path: Path) -> None:
    """ResNet's 1.25 at a window of 3 and 1.5 at one of 6."""
    path.parent.mkdir(parents=True, exist_ok=True)
    base = costs.case()
    for case in distinct(base, sweep(base, windows=[3, 6])):
        append_lines(path, costs.records(case, gn=1.1, cbn=1 + case.window / 12))


def fidelity() -> list[FidelityRecord]:
    """The same errors everywhere: of the layer's own drift half is explained, of the network's a fifth."""
    found = {
        SAME_LAYER: Fidelity(8, 0.1, 0.0, 0.2, 0.1, None, 0.25),
        WHOLE_NETWORK: Fidelity(8, 0.4, 0.3, 0.5, 0.4, 0.6, 0.25),
    }
    return [
        FidelityRecord(step, layer, age, truth, errors)
        for step in (10, 20)
        for layer in ("bn1", "bn2")
        for age in (1, 2)
        for truth, errors in found.items()
    ]


def write_diagnosis(folder: Path) -> None:
    folder.mkdir(parents=True)
    append_lines(folder / "records.jsonl", fidelity())
    context = {"model": "tiny", "window": "3", "burn-in": "0", "torch": "2.6", "commit": "", "processor": "abacus"}
    (folder / "context.json").write_text(json.dumps(context))


def write_demo(folder: Path) -> None:
    folder.mkdir(parents=True)
    append_lines(folder / "records.jsonl", three_norms())


def write_all(folder: Path) -> None:
    """A folder with records of every command. The experiment "pretended" has to be registered."""
    write_demo(folder / "demo")
    write_results(folder / "paper" / "pretended-small.jsonl")
    write_trainings(folder / "runs")
    write_costs(folder / "cost" / "records.jsonl")
    write_diagnosis(folder / "diagnosis")
