"""The norms side by side at a small batch, and BN at a large one: the paper's first table."""

from collections.abc import Sequence

from crossbn.lab.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.lab.experiments.cells import TITLES, cbn, plain
from crossbn.lab.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Norms: IN, LN, GN, BN and CBN at a small batch, BN at 32"
ALONE = False
REFERENCE = "BN at batch 32"
PAPER = {"IN": 64.4, "LN": 67.9, "GN": 68.9, "CBN": 70.2, REFERENCE: 70.2}
"""Top-1 accuracy of ResNet-18 on ImageNet at batch size 4, and at 32 for the last."""


def cells(scale: Scale) -> Cells:
    """Return the cells by what they are called."""
    size = BATCH_SIZE[scale]
    others = {TITLES[norm]: plain(norm, size) for norm in ("in", "ln", "gn", "bn")}
    return {**others, "CBN": cbn(size), REFERENCE: plain("bn", 32)}


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each norm."""
    return make_tasks(cells(scale).values(), scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each norm, compared with CBN."""
    return list_rows(results, cells(scale_of(results)), "CBN", PAPER)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        f"Batches of {BATCH_SIZE[scale]} where nothing else is said.",
        "The paper's numbers, of ResNet-18 on ImageNet, are taken to be at batch size 4, BN's at 32; its text was not "
        "at hand to check that with.",
    ]
