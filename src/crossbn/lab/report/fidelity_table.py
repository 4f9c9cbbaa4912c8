"""Fidelity as text, for the terminal and for Markdown alike."""

from collections.abc import Mapping, Sequence

from crossbn.lab.fidelity.records import (
    ALL,
    CAUSES,
    TRUTHS,
    Averages,
    Fidelity,
    FidelityRecord,
    by_age,
    by_layer,
    by_progress,
)
from crossbn.lab.report.table import Table

COLUMNS = 5  # of each truth
_PARTS = 4  # of the training


def fidelity_tables(records: Sequence[FidelityRecord]) -> list[Table]:
    """Return the tables by age, by progress and by layer, averaged over everything else."""
    return [
        _table("By age of the statistics", "age", by_age(records)),
        _table("By progress of the training", "from step", by_progress(records, _PARTS)),
        _table("By layer", "layer", by_layer(records)),
    ]


def cause_table(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> Table:
    """Return the errors of mean and variance by layer and cause; see `crossbn.lab.fidelity.causes`."""
    causes = (*CAUSES, ALL)
    columns = tuple(f"{kind}: {cause}" if cause == CAUSES[0] else cause for kind in _KINDS for cause in causes)
    rows = tuple(
        (layer, *(percent(errors[cause][_KINDS[kind]]) for kind in _KINDS for cause in causes))
        for layer, errors in found.items()
    )
    return Table("By cause", ("layer", *columns), rows)


_KINDS = {"variance": 1, "mean": 0}  # and their places in a pair of errors


def _table(title: str, key: str, groups: Mapping[int, Averages] | Mapping[str, Averages]) -> Table:
    rows = tuple((str(name), *_cells(found)) for name, found in groups.items())
    errors = ("variance", "explained", "mean", "explained")
    same, network = ((f"{truth}: {errors[0]}", *errors[1:]) for truth in TRUTHS)
    return Table(title, (key, *same, "guard", *network, "batches"), rows)


def _cells(found: Averages) -> list[str]:
    same, network = (found.get(truth) for truth in TRUTHS)
    best = same or network
    assert best is not None, "a group has records"
    noise = None if network is None else network.batch_noise
    return [*_errors(same), percent(best.invalid), *_errors(network), "" if noise is None else percent(noise)]


def _errors(found: Fidelity | None) -> list[str]:
    if found is None:
        return [""] * 4
    return [
        change(found.naive_var_error, found.compensated_var_error),
        percent(found.explained_var),
        change(found.naive_mean_error, found.compensated_mean_error),
        percent(found.explained_mean),
    ]


def change(naive: float, compensated: float) -> str:
    """Return both errors in percent.

    Example:
        >>> change(0.1234, 0.05)
        '12.3 → 5.0'
    """
    return f"{100 * naive:.1f} → {100 * compensated:.1f}"


def percent(share: float) -> str:
    """Return a share in percent, without the sign for 0.

    Example:
        >>> percent(0.256), percent(-0.0001)
        ('25.6', '0.0')
    """
    return f"{100 * share:.1f}".replace("-0.0", "0.0") if abs(share) < 5e-4 else f"{100 * share:.1f}"


def caption(records: Sequence[FidelityRecord], left_out: Mapping[str, str], context: Mapping[str, str]) -> str:
    """Say what the numbers are, what was left out, and what they were measured with."""
    count = len({record.step for record in records})
    text = f"{explanation()} {count} {'measurement' if count == 1 else 'measurements'}. "
    if left_out:
        text += f"Left out: {_reasons(left_out)}. "
    return text + ", ".join(f"{name} {value}" for name, value in context.items()) + "."


def explanation() -> str:
    """Say what the numbers are."""
    return (
        "All numbers in percent. Errors of remembered statistics, as they were (naive) → moved to today's weights "
        "(compensated): variances relative to the true variance of all batches of a measurement, means in its standard "
        "deviations. A measurement, made between two training steps, compares all steps that are remembered then. The "
        "truth: the operator's old input with today's weights (same layer), or the old step done again with today's "
        "weights in all layers, each norm pooling the same batches as then (whole network). Explained: the share of "
        "the distance that compensation takes away. Batches: how far the variances of single batches are from their "
        "average. Guard: compensated variances below 0, clipped. By cause: what is left of the way from compensated "
        "statistics to those of all remembered batches run together as one; own weights: what compensation lacks; "
        "weights before: the training of earlier layers since; norms before: earlier norms pooled other batches then."
    )


def _reasons(left_out: Mapping[str, str]) -> str:
    """Name each reason once, with how many it concerns where they are many."""
    layers: dict[str, list[str]] = {}
    for layer, reason in left_out.items():
        layers.setdefault(reason, []).append(layer)
    shown = {
        reason: ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"
        for reason, names in layers.items()
    }
    return "; ".join(f"{names}: {reason}" for reason, names in shown.items())
