"""The paper's table of costs: memory, arithmetic, speed of training and of inference with BN, GN and CBN."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossbn.lab.cost import Case, CostRecord, Precision, find_baseline
from crossbn.lab.environment import best_device, usable_cores
from crossbn.lab.experiments import paper
from crossbn.lab.experiments.estimates import training_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, Values
from crossbn.lab.experiments.notes import notes_of
from crossbn.lab.progress import Progress, Watch
from crossbn.lab.records import Record, Task, by_name
from crossbn.lab.statistics import Spread
from crossbn.schedules import window_for

BATCH_SIZE = 4
_SIZES = {Scale.SMALL: (("resnet18", 64), ("resnet18", 112)), Scale.FULL: (("resnet50", 224),)}
_ROUNDS, _MAX_SECONDS = 20, 120.0
# Of a round, in forward passes: four training steps (BN, GN, CBN, CBN in burn-in) of three each, five inferences.
_FORWARDS_A_ROUND = 4 * 3 + 5
_SPEEDS = ("training", "inference")


def case_of(task: Task) -> Case:
    """Return what a run measures."""
    settings: Any = task.settings
    return Case(
        settings["model"],
        (3, settings["image_size"], settings["image_size"]),
        settings["batch_size"],
        window_for(settings["batch_size"]),
        device=settings["device"],
        threads=settings["threads"],
        precision=Precision(_ROUNDS, max_seconds=_MAX_SECONDS),
    )


class Cost:
    """See `experiment.Experiment`."""

    title = "Cost table: memory, FLOPs, speed of training and inference with BN, GN and CBN"
    measures = (
        Measure("memory", "peak MB", ",.0f"),
        Measure("flops", "GFLOP", ",.1f"),
        Measure("training", "train, steps/s", ".2f"),
        Measure("training_ratio", "time / BN", ".2f"),
        Measure("inference", "infer, 1/s", ".2f"),
        Measure("inference_ratio", "time / BN", ".2f"),
    )
    scales = (Scale.SMALL, Scale.FULL)
    alone = True

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return the measurements; a seed is a repetition, of which one is enough by default."""
        here = {"device": best_device(), "threads": usable_cores()}
        return [
            Task("cost", f"{model}, {size} px", seed, {**_told(model, size), **here})
            for model, size in _SIZES[scale]
            for seed in range(seeds or 1)
        ]

    def estimate_seconds(self, task: Task) -> float:
        """Return the time of the fewest rounds, with those to warm up; a restless machine takes more of them."""
        case = case_of(task)
        images = case.batch_size * _FORWARDS_A_ROUND * (_ROUNDS + case.window)
        return training_seconds(case.model, case.input_shape[-1], 0, images)

    def check(self, tasks: Sequence[Task]) -> None:
        """Nothing can be missing: the networks are torchvision's, the images random."""

    def work(self, task: Task, watch: Watch, _: Path | None = None, /) -> Values:
        """Measure the norms of a case side by side."""
        from crossbn.lab.cost.measuring import measure

        records = measure(case_of(task), watch=lambda phrase: watch(Progress(0.0, phrase)))
        return {"norms": [json.loads(record.record().to_json()) for record in records]}

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return a row for each norm of each case, then the paper's, which are of another network."""
        table = []
        for name, repetitions in by_name(records).items():
            found = [_records(record) for record in repetitions]
            for place, record in enumerate(found[0]):
                numbers = [_numbers(each[place], each) for each in found]
                ours = {key: Spread.of([each[key] for each in numbers]) for key in numbers[0]}
                table.append(Comparison(f"{name}: {record.name}", ours))
        return [*table, *(_of_paper() if table else ())]

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are."""
        return [*notes_of("cost", scale), paper.about("cost")]


def _told(model: str, size: int) -> dict[str, Any]:
    return {"model": model, "image_size": size, "batch_size": BATCH_SIZE}


def _of_paper() -> list[Comparison]:
    known = paper.numbers("cost")
    bn = next(iter(known.values()))
    ratios = {name: {f"{kind}_ratio": bn[kind] / row[kind] for kind in _SPEEDS} for name, row in known.items()}
    return [
        Comparison(name, {key: Spread(value, None) for key, value in {**row, **ratios[name]}.items()})
        for name, row in known.items()
    ]


def _records(record: Record) -> list[CostRecord]:
    return [CostRecord.of(Record.from_json(json.dumps(each))) for each in record.values["norms"]]


def _numbers(record: CostRecord, beside: Sequence[CostRecord]) -> dict[str, float]:
    flops = (record.network_flops, record.norm_flops)
    train, infer = record.timings["train"], record.timings["eval"]
    is_baseline = record is find_baseline(record, beside)
    return {
        "memory": record.peak_bytes / 1e6,
        "flops": sum(count.forward + count.backward for count in flops) / 1e9,
        "training": 1 / train.seconds,
        "training_ratio": 1.0 if is_baseline else train.ratio,
        "inference": 1 / infer.seconds,
        "inference_ratio": 1.0 if is_baseline else infer.ratio,
    }
