"""Accuracy against batch size: the paper's first figure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crossbn.lab.experiments.accuracies import Cells, grid_rows
from crossbn.lab.experiments.cells import cbn, exact, plain
from crossbn.lab.experiments.classification import check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.learning_rate import at_chosen_rate, norms
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Accuracy by batch size: BN, GN, BRN and CBN"
ALONE = False
SIZES = (32, 16, 8, 4, 2, 1)
NORMS = ("BN", "GN", "BRN", "CBN")
NAIVE, DETACHED = "naive", "detached"
"""Where CBN matters most, CBN without compensation, and without its gradient."""
WIDER = "CBN, k = 16"
"""At batch size 1 the paper's window of 8 holds half the examples that it holds elsewhere."""
BOUND = "exact, own layer"
MEDIUM_SIZES, BOUND_SIZE = (32, 8, 4, 2, 1), 2
"""Of medium scale. The bound takes as long as all else together, so it is at one size only."""
MEDIUM_NORMS = ("BN", "BN, WS", "GN", "GN, WS", "BRN", "EvoNorm-S0", "FRN, TLU", "CBN, equal", "CBN", "CBN, WS")
MEASURES: tuple[Measure, ...] = tuple(
    Measure(name, f"{name}, %", ".1f")
    for name in dict.fromkeys((*MEDIUM_NORMS[:7], *NORMS, *MEDIUM_NORMS[7:], NAIVE, DETACHED, WIDER, BOUND))
)


def grid(scale: Scale = Scale.SMALL) -> Mapping[str, Cells]:
    """Return the cells by batch size and norm."""
    if scale is Scale.MEDIUM:
        return {f"batch {size}": _medium_row(size) for size in MEDIUM_SIZES}
    return {f"batch {size}": _row(size) for size in SIZES}


def _medium_row(size: int) -> Cells:
    row = {norm: at_chosen_rate(cell, norm) for norm, cell in norms(size).items()}
    if size == max(MEDIUM_SIZES):
        return {"BN": row["BN"]}
    if size == BOUND_SIZE:
        row[BOUND] = at_chosen_rate(replace(exact(size, "own"), burn_in=0.0), "CBN")
    return row


def _row(size: int) -> Cells:
    row = {"BN": plain("bn", size), "GN": plain("gn", size), "BRN": plain("brn", size), "CBN": cbn(size)}
    if size <= 2:
        row |= {NAIVE: cbn(size, order=0), DETACHED: cbn(size, backward="detached")}
    return {**row, WIDER: cbn(size, 16)} if size == 1 else row


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each norm at each batch size."""
    return make_tasks([cell for row in grid(scale).values() for cell in row.values()], scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each batch size, CBN compared with the others."""
    return grid_rows(results, grid(scale_of(results)), "CBN")


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    if scale is Scale.MEDIUM:
        return [
            *describe(scale),
            "Each norm has its own learning rate, chosen on validation images by `reproduce learning_rate`; nothing "
            "is chosen by batch size. CBN is what `convert_` gives without other arguments: automatic weights, no "
            "burn-in, a window of 8 at 1 and 2, 4 at 4, 2 at 8; equal is the same with the paper's weights. WS: "
            "weights are standardized. Exact, own layer is what CBN approximates, see `reproduce bound`. GN and "
            "EvoNorm-S0 have 8 groups. EvoNorm-S0 and FRN are timm's layers and stand for a norm and the ReLU behind "
            "it; before a sum they have no activation, and EvoNorm-S0 is gamma and beta alone there, as in its "
            "paper's code.",
            "The paper has no such table.",
        ]
    return [
        *describe(scale),
        "CBN's window is the paper's, 8 at batch sizes 1 and 2, 4 at 4, 2 at 8; at 16 and 32 it is 1, and CBN is BN: "
        "one run stands in both columns. At 1 and 2 CBN stands beside itself without compensation (naive) and without "
        "the gradient through it (detached).",
        "All batch sizes see the same images equally often, so that large ones take few steps, at small scale fewer "
        "than they need: where accuracy falls towards large batches, for GN as well, whose statistics do not depend on "
        "the batch, steps are lacking and not statistics. Compare norms within a row.",
        "BN is tested with running averages of momentum 0.1, at batch size 2 of about twenty images: part of what it "
        "loses is lost there.",
        "The paper's own numbers are not beside these: no source at hand showed them to check them with.",
    ]
