"""What might bring CBN nearer to exact statistics over the window; the paper has no such table.

Of what was tried only `decay` has helped. The code of the others is gone; their results at small scale are still shown.
"""

from collections.abc import Sequence

from crossbn.lab.experiments import classification
from crossbn.lab.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.lab.experiments.cells import cbn, exact, plain, varied
from crossbn.lab.experiments.classification import BATCH_SIZE, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Scale, UnavailableError
from crossbn.lab.experiments.tasks import Result, Task
from crossbn.schedules import window_for

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Improvements: what might bring CBN nearer to exact statistics (ours, not the paper's)"
ALONE = False
SEEDS = {Scale.SMALL: 5, Scale.FULL: 1}
_SEEDS_OF_VARIANTS = {"bn": 4, "cbn": 3}  # as many as were trained before they left
_LAST_COMMIT = "61dfb96"


def cells(scale: Scale) -> Cells:
    """Return the cells by what they are called."""
    size = BATCH_SIZE[scale]
    own, bn = cbn(size), plain("bn", size)
    kept = {"BN": bn, "CBN": own, "CBN, decay 0.7": cbn(size, decay=0.7), "exact, own layer": exact(size, "own")}
    if scale is Scale.FULL:
        return kept
    return {
        **{"BN": bn, "BN, recalibrated": varied(bn, "recalibrated"), "CBN": own},
        "CBN, decay 0.7": kept["CBN, decay 0.7"],
        f"CBN, window from 2 to {window_for(size)}": varied(own, "growing from 2"),
        **{f"CBN, {name}": varied(own, name) for name in ("extrapolated", "recalibrated")},
        "exact, own layer": kept["exact, own layer"],
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each variant, and those that it is to be judged by."""
    tasks = make_tasks(cells(scale).values(), scale, seeds or SEEDS[scale])
    return [task for task in tasks if not _has_left(task) or task.seed < _SEEDS_OF_VARIANTS[str(task.settings["norm"])]]


def _has_left(task: Task) -> bool:
    return "variant" in task.settings


def check(tasks: Sequence[Task]) -> None:
    """Raise UnavailableError if a run is of a variant that is gone, or something that runs need is missing."""
    if gone := [task.name for task in tasks if _has_left(task)]:
        raise UnavailableError(
            f"{gone[0]!r} can be shown and no longer be trained: variants that did not help are gone since the commit "
            f"after {_LAST_COMMIT}; their results are in benchmarks/reproduce, to be given as --output"
        )
    classification.check(tasks)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each training, compared with CBN."""
    return list_rows(results, cells(scale_of(results)), "CBN")


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    size = BATCH_SIZE[scale]
    told = [
        *describe(scale),
        f"Batches of {size}, a window of {window_for(size)} where no other is named. CBN counts each step of its "
        "window alike. Exact, own layer, is what it approximates, see `reproduce bound`; what it lacks are the weight "
        "changes of the layers before.",
        "Decay: a remembered step counts 0.7 to the power of its age, today's step 1, see `reproduce weights`.",
    ]
    if scale is Scale.SMALL:
        told += _notes_of_variants(window_for(size))
    return [
        *told,
        f"{len(cells(scale)) - 1} rows beside CBN's are as many chances to be lucky: a difference of two standard "
        "errors is no proof among so many.",
        "The paper has no such table.",
    ]


def _notes_of_variants(window: int) -> list[str]:
    return [
        f"Window from 2 to {window}: it grows as the learning rate falls, so that weights move about "
        "as far over any window: 2 times the learning rate at the end of the burn-in over today's, rounded down.",
        "Extrapolated: remembered moments are moved on, in proportion to their age, by a slow average (0.02 a step) of "
        "what they turned out to lack beside today's.",
        "Recalibrated: before each test the running statistics are replaced by those of the last 128 training batches "
        "under today's weights. Training is not touched, so it is to be compared with the same norm; BN has it too.",
        "This table has five seeds, where others have three; of these last variants, which have left the library, it "
        "has three, of recalibrated BN four.",
    ]
