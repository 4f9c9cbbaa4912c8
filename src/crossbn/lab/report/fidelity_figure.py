"""Errors of naive and compensated variances by age, by layer and during training."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from crossbn.lab.fidelity.fidelity_records import SAME_LAYER, WHOLE_NETWORK, FidelityRecord
from crossbn.lab.fidelity.grouping import Averages, by_age, by_layer, by_progress
from crossbn.lab.report.figure import COLOURS, LINES

_NAIVE, _COMPENSATED = COLOURS[0], COLOURS[1]
_STYLES = {WHOLE_NETWORK: LINES[0], SAME_LAYER: LINES[1]}
_FLOOR = 1e-4  # of the logarithmic axis: a hundredth of a percent


def plot_fidelity(records: Sequence[FidelityRecord]) -> Figure:
    """Return the errors of the variance, a panel for each grouping."""
    figure = Figure(figsize=(10.8, 4.0), dpi=150, layout="constrained")
    age, layer, step = figure.subplots(1, 3, sharey=True)
    ages, layers, steps = by_age(records), by_layer(records), by_progress(records)
    _draw_panel(age, "Age of the statistics, steps", list(ages), list(ages.values()))
    _draw_panel(layer, "Layer, in the order of the network", list(range(1, 1 + len(layers))), list(layers.values()))
    _draw_panel(step, "Training step", list(steps), list(steps.values()))
    age.set_yscale("log")
    age.set_ylim(bottom=max(_FLOOR, age.get_ylim()[0]))
    age.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    age.set_ylabel("Error of the variance")
    handles, labels = age.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(
        "How far remembered variances are from the true ones at today's weights",
        x=0.01,
        horizontalalignment="left",
        fontsize=11,
    )
    return figure


def _draw_panel(axes: Axes, label: str, places: Sequence[int], found: Sequence[Averages]) -> None:
    for truth, line in _STYLES.items():
        shown = [(place, each[truth]) for place, each in zip(places, found, strict=True) if truth in each]
        if not shown:
            continue
        x = [place for place, _ in shown]
        for name, colour, errors in (
            ("naive", _NAIVE, [each.naive_var_error for _, each in shown]),
            ("compensated", _COMPENSATED, [each.compensated_var_error for _, each in shown]),
        ):
            drawn = [max(error, _FLOOR) for error in errors]
            axes.plot(x, drawn, color=colour, linestyle=line, marker="o", markersize=3, label=f"{name}, {truth}")
    noise = [
        (place, each[WHOLE_NETWORK].batch_noise)
        for place, each in zip(places, found, strict=True)
        if WHOLE_NETWORK in each and each[WHOLE_NETWORK].batch_noise is not None
    ]
    if noise:
        axes.plot(
            *zip(*noise, strict=True), color="#777777", linestyle=LINES[2], label="single batches from their average"
        )
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
