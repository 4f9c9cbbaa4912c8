"""How long to begin as BN: the paper's ablation of the burn-in, for both ways of the gradient."""

from collections.abc import Mapping, Sequence

from crossbn.lab.experiments.accuracies import Cells, grid_rows
from crossbn.lab.experiments.cells import BURN_IN, cbn
from crossbn.lab.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Burn-in: how long a training begins with BN"
ALONE = False
SHARES = (0.0, 0.1, BURN_IN, 0.5, 0.75)
THROUGH, DETACHED = "through", "detached"
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in (THROUGH, DETACHED))


def grid(scale: Scale) -> Mapping[str, Cells]:
    """Return the cells by burn-in and gradient."""
    size = BATCH_SIZE[scale]
    return {
        f"{share:.0%}": {each: cbn(size, backward=each, burn_in=share) for each in (THROUGH, DETACHED)}
        for share in SHARES
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each burn-in and each gradient."""
    return make_tasks([cell for row in grid(scale).values() for cell in row.values()], scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each burn-in, the gradients compared."""
    return grid_rows(results, grid(scale_of(results)), THROUGH)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        f"Rows are shares of the training, {BURN_IN:.0%} the paper's choice; batches of {BATCH_SIZE[scale]}. Gradients "
        'follow the compensated statistics into today\'s weights ("through", the default) or do not ("detached", what '
        "the paper's released code does). The learning rate falls all the time: the later the window opens, the less "
        "weights change within it.",
        "The paper's own numbers are not beside these: no source at hand showed them to check them with.",
    ]
