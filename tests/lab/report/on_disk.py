"""Folders of records as the commands leave them, with chosen numbers."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from crossbn.lab.cost import CostRecord
from crossbn.lab.cost.cases import distinct, sweep
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.fidelity import WHOLE_NETWORK
from crossbn.lab.fidelity.records import SAME_LAYER
from crossbn.lab.records import Record, append
from tests.lab.cost import handmade as costs
from tests.lab.experiments import handmade as demos
from tests.lab.experiments import pretended

MADE = {"versions": {"torch": "2.6"}, "machine": {"processor": "abacus"}, "commit": "abc1234"}
CURVE = ("epoch", "train_loss", "train_accuracy", "test_accuracy")


def write(path: Path, records: Sequence[Record]) -> None:
    """Add records to a file, in a folder that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, records)


def training(norm: str, seed: int, *accuracies: float, **changes: Any) -> Record:
    """A record of `crossbn train classify`: test accuracy after each epoch, training a tenth better."""
    moments = [(1.0 + i, 2.0 - i / 2, share + 0.1, share) for i, share in enumerate(accuracies)]
    settings: dict[str, Any] = {
        **{"data": "digits", "model": "resnet8", "norm": norm, "norm_options": {}, "window": None, "batch_size": 2},
        **{"learning_rate": None, "processes": 1},
    }
    values = {
        **{"accuracy": accuracies[-1], "curve": [dict(zip(CURVE, each, strict=True)) for each in moments]},
        **{"seconds": 60.0, "seconds_per_step": 0.01, "window_used": 8, "learning_rate_used": 0.00625, **changes},
    }
    return Record("classify", f"{norm}, resnet8", seed, settings, values, MADE)


def write_trainings(folder: Path) -> None:
    """BN ends at 42 ± 2.8, CBN at 49 ± 1.4."""
    for norm, accuracies in {"bn": (0.40, 0.44), "cbn": (0.48, 0.50)}.items():
        for seed, accuracy in enumerate(accuracies):
            write(folder / f"{norm}-{seed}" / "record.jsonl", [training(norm, seed, 0.1, accuracy)])


def detector(norm: str, seed: int, score: float) -> Record:
    """A record of `crossbn train detect`."""
    values = {
        **{"scores": {"AP": score, "APl": None}, "waiting_share": 0.02, "seconds": 100.0},
        "curve": [{"epoch": 12.0, "train_loss": 0.5, "scores": {"AP": score}}],
    }
    return Record("detect", f"{norm}, shapes", seed, {"data": "shapes", "norm": norm}, values, MADE)


def result(name: str, seed: int, settings: dict[str, Any], number: float, kind: str = "pretended") -> Record:
    """A run of a table."""
    return Record(kind, name, seed, settings, {"number": number, "square": number**2, "seconds": 90.0}, MADE)


def write_results(path: Path, seeds: int = 2) -> None:
    """Of the experiment "pretended": one is 1 ± 0.71 and so on."""
    tasks = pretended.configs(Scale.SMALL, seeds)
    made = [result(each.name, each.seed, dict(each.settings), each.settings["number"] + each.seed) for each in tasks]
    write(path, made[::-1])  # files are in the order in which runs have finished


def cost(of: CostRecord) -> Record:
    """A record of `crossbn cost`."""
    found = asdict(of)
    settings = {**found.pop("case"), "norm": found.pop("norm"), "compiled": found.pop("compiled")}
    own = {name: value for name, value in found.items() if name not in (*MADE, "environment")}
    return Record("cost", str(of.case), 0, settings, own, MADE)


def write_costs(path: Path) -> None:
    """CBN's step takes 1.25 at a window of 3 and 1.5 at one of 6."""
    base = costs.case()
    for case in distinct(base, sweep(base, windows=[3, 6])):
        write(path, [cost(each) for each in costs.records(case, gn=1.1, cbn=1 + case.window / 12)])


def fidelity(**told: Any) -> list[Record]:
    """The same errors everywhere: of the layer's own drift half is explained, of the network's a fifth."""
    names = ("channels", "naive_mean_error", "compensated_mean_error", "naive_var_error", "compensated_var_error")
    found: dict[str, dict[str, Any]] = {
        SAME_LAYER: dict(zip((*names, "batch_noise", "invalid"), (8, 0.1, 0.0, 0.2, 0.1, None, 0.25), strict=True)),
        WHOLE_NETWORK: dict(zip((*names, "batch_noise", "invalid"), (8, 0.4, 0.3, 0.5, 0.4, 0.6, 0.25), strict=True)),
    }
    return [
        Record("diagnose", "", 0, {**told, "step": step, "layer": layer, "age": age, "truth": truth}, errors, MADE)
        for step in (10, 20)
        for layer in ("bn1", "bn2")
        for age in (1, 2)
        for truth, errors in found.items()
    ]


def write_diagnosis(path: Path) -> None:
    """Of a model called tiny, at a window of 3."""
    write(path, fidelity(model="tiny", window=3, burn_in=0, loss=None))


def demo(norm: str, batch_size: int, seed: int, *accuracies: float, **changes: Any) -> Record:
    """A record of `crossbn demo`."""
    made = demos.record(*accuracies, norm=norm, batch_size=batch_size, seed=seed)
    return replace(made, settings={**made.settings, **changes}, environment=MADE)


def three_norms() -> list[Record]:
    """The ceiling at 95 ± 1 %, BN at 41 ± 4 % and CBN at 94 ± 1 %."""
    return [replace(each, environment=MADE) for each in demos.three_norms()]


def write_demo(folder: Path) -> None:
    """The three norms."""
    write(folder / "records.jsonl", three_norms())


def checked(passed: bool | None = True) -> Record:
    """A record of `crossbn check`."""
    findings: dict[str, Any] = {"operators": {"passed": passed, "sentence": "12 of 12 agree.", "values": {}}}
    return Record("check", "cpu", 0, {"device": "cpu"}, {"findings": findings, "verdict": "All is right on cpu."}, MADE)


def write_all(folder: Path) -> None:
    """A folder with records of every command. The experiment "pretended" has to be registered."""
    write_demo(folder / "demo")
    write_results(folder / "paper" / "pretended-small.jsonl")
    write_trainings(folder / "runs")
    write_costs(folder / "cost" / "records.jsonl")
    write_diagnosis(folder / "diagnosis" / "records.jsonl")
    write(folder / "check" / "records.jsonl", [checked()])
