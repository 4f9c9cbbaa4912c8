"""What a norm with a window could reach at best, and by which part of the gradient; the paper has no such table."""

from collections.abc import Sequence

from crossbn.lab.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.lab.experiments.cells import cbn, exact, plain
from crossbn.lab.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Scale
from crossbn.lab.experiments.tasks import Result, Task
from crossbn.schedules import window_for

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Bound: exact statistics over the window, by the gradient they pass on (ours, not the paper's)"
ALONE = False


def cells(scale: Scale) -> Cells:
    """Return the cells by what they are called."""
    size = BATCH_SIZE[scale]
    large = size * window_for(size)
    return {
        **{f"BN at batch {size}": plain("bn", size), "CBN, detached": cbn(size, backward="detached"), "CBN": cbn(size)},
        **{"exact, no gradient": exact(size, "none"), "exact, own layer": exact(size, "own")},
        **{"exact, full gradient": exact(size, "full"), f"BN at batch {large}": plain("bn", large)},
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return the trainings with exact statistics, and those that they bound."""
    return make_tasks(cells(scale).values(), scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each training, compared with CBN."""
    return list_rows(results, cells(scale_of(results)), "CBN")


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    size = BATCH_SIZE[scale]
    return [
        *describe(scale),
        f"Batches of {size}, a window of {window_for(size)}. Exact: the images of the window's earlier steps go "
        "through the network again with today's weights, beside the current ones, whose loss alone is taken; the "
        "burn-in is CBN's. What remembered images do to the statistics passes gradients on to all weights (full: the "
        "ceiling of any norm over this window), to the weights right before each norm (own layer: the ceiling of a "
        "norm that knows its own layer), or to none.",
        "A bound holds for the statistics, not for accuracy: noise in statistics can help a training, and a norm may "
        "come out above its bound.",
        "The paper has no such table.",
    ]
