"""The norms side by side at a batch that is large enough for all of them, and at one that is not."""

from collections.abc import Sequence

from crossbn.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.experiments.cells import TITLES, cbn, plain
from crossbn.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.experiments.classification_estimates import estimate_seconds
from crossbn.experiments.experiment import Comparison, Scale
from crossbn.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Norms: IN, LN, GN, CBN and BN"
ALONE = False
LARGE = 32
PAPER = {"IN": 64.4, "LN": 67.9, "GN": 68.9, "CBN": 70.2, "BN": 70.2}
"""Top-1 accuracy of ResNet-18 on ImageNet."""


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each norm at both batch sizes."""
    return make_tasks([*_cells(LARGE).values(), *_cells(BATCH_SIZE[scale]).values()], scale, seeds)


def _cells(batch_size: int) -> Cells:
    return {
        f"{TITLES[norm]} at batch {batch_size}": cbn(batch_size) if norm == "cbn" else plain(norm, batch_size)
        for norm in ("in", "ln", "gn", "cbn", "bn")
    }


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each norm at each batch size, compared with CBN there."""
    small = BATCH_SIZE[scale_of(results)]
    paper = {f"{title} at batch {LARGE}": accuracy for title, accuracy in PAPER.items()}
    return [
        *list_rows(results, _cells(LARGE), f"CBN at batch {LARGE}", paper),
        *list_rows(results, _cells(small), f"CBN at batch {small}"),
    ]


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        f"At batch size {LARGE} the paper's window is 1, and CBN is BN: one run stands in both rows. The rows at batch "
        f"size {BATCH_SIZE[scale]} are ours.",
        f"The paper's numbers, of ResNet-18 on ImageNet, are taken to be at batch size {LARGE}; its text was not at "
        "hand to check that with.",
    ]
