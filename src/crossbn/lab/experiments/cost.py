"""The paper's table of costs: memory, arithmetic, speed of training and of inference with BN, GN and CBN."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from crossbn.lab.cost import Case, CostRecord, Precision, find_baseline, find_model, measure
from crossbn.lab.experiments.cores import usable_cores
from crossbn.lab.experiments.estimates import count_forward_flops, measure_flops_per_second
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.rows import Spread
from crossbn.lab.experiments.tasks import News, Result, Task, Values, by_name
from crossbn.schedules import window_for

TITLE = "Cost table: memory, FLOPs, speed of training and inference with BN, GN and CBN"
ALONE = True
MEASURES: tuple[Measure, ...] = (
    Measure("memory", "peak MB", ",.0f"),
    Measure("flops", "GFLOP", ",.1f"),
    Measure("training", "train, steps/s", ".2f"),
    Measure("training_ratio", "time / BN", ".2f"),
    Measure("inference", "infer, 1/s", ".2f"),
    Measure("inference_ratio", "time / BN", ".2f"),
)
BATCH_SIZE = 4
_SIZES = {Scale.SMALL: (("resnet18", 64), ("resnet18", 112)), Scale.FULL: (("resnet50", 224),)}
_ROUNDS, _MAX_SECONDS = 20, 120.0
# Of a round, in forward passes: four training steps (BN, GN, CBN, CBN in burn-in) of three each, five inferences.
_FORWARDS_A_ROUND = 4 * 3 + 5


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return the measurements; a seed is a repetition, of which one is enough by default."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        Task(
            "cost",
            f"{model}, {size} px",
            seed,
            {"model": model, "image_size": size, "batch_size": BATCH_SIZE, "device": device, "threads": usable_cores()},
        )
        for model, size in _SIZES[scale]
        for seed in range(seeds or 1)
    ]


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


def estimate_seconds(task: Task) -> float:
    """Return the time of the fewest rounds, with those to warm up; a restless machine takes more of them."""
    case = case_of(task)
    forward = case.batch_size * count_forward_flops(find_model(case.model), case.input_shape)
    return forward * _FORWARDS_A_ROUND * (_ROUNDS + case.window) / measure_flops_per_second(case.threads)


def check(_: Sequence[Task]) -> None:
    """Nothing can be missing: the networks are torchvision's, the images random."""


def work(task: Task, watch: Callable[[News], None], _: Path | None = None) -> Values:
    """Measure the norms of a case side by side."""
    records = measure(case_of(task), watch=lambda phrase: watch(News(0.0, phrase)))
    return {"norms": [json.loads(record.to_json()) for record in records]}


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each norm of each case."""
    table = []
    for name, repetitions in by_name(results).items():
        found = [_records(result) for result in repetitions]
        for place, record in enumerate(found[0]):
            numbers = [_numbers(records[place], records) for records in found]
            ours = {key: Spread.of([each[key] for each in numbers]) for key in numbers[0]}
            table.append(Comparison(f"{name}: {record.name}", ours))
    return table


def _records(result: Result) -> list[CostRecord]:
    return [CostRecord.from_json(json.dumps(record)) for record in result.values["norms"]]


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


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    told = [
        f"Batches of {BATCH_SIZE}. A step is forward, loss, backward and SGD with momentum, CBN's window of "
        f"{window_for(BATCH_SIZE)} full. Peak memory and FLOPs are of such a step, two FLOPs for a multiply-add. "
        "Speeds are medians, times relative to BN medians of the ratios round by round, all norms in turn.",
        "The paper's own numbers are not beside these: no source at hand showed its table to check them with.",
    ]
    if scale is Scale.SMALL:
        told.append("Small scale: another network and smaller images than the paper's, on this machine.")
    return told
