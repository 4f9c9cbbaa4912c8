"""How costs grow with sizes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from crossbn.lab.cost.cases import BASELINE, Case
from crossbn.lab.cost.records import CostRecord
from crossbn.lab.cost.sweep import Growth
from crossbn.lab.report.figure import COLOURS, LINES

_LABELS = {"window": "Window, steps", "batch size": "Batch size", "image size": "Image size, pixels"}


def plot_growth(growth: Growth, records: Sequence[CostRecord]) -> Figure:
    """Return the time of a training step relative to BN, a panel for each size that grows.

    Args:
        growth: the cases, by the size that they differ in.
        records: of these cases.
    """
    figure = Figure(figsize=(1.2 + 3.2 * len(growth), 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(growth), sharey=True, squeeze=False)[0]
    for axes, (size, cases) in zip(panels, growth.items(), strict=True):
        _draw_panel(axes, size, cases, records)
    panels[0].set_ylabel("Relative to BN")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1 + 2 * len(growth), frameon=False)
    figure.suptitle("Time of a training step, band: 95 % interval", x=0.01, horizontalalignment="left", fontsize=11)
    return figure


def _draw_panel(axes: Axes, size: str, cases: Sequence[Case], records: Sequence[CostRecord]) -> None:
    axes.axhline(1, color="#777777", linewidth=1, label="BN")
    ordered = sorted(cases, key=lambda case: _value(case, size))
    kinds = dict.fromkeys((r.norm, r.compiled) for r in records if r.norm != BASELINE)
    norms = list(dict.fromkeys(norm for norm, _ in kinds))
    for norm, compiled in kinds:
        found = {r.case: r for r in records if (r.norm, r.compiled) == (norm, compiled)}
        shown = [found[case] for case in ordered]
        timings = [record.timings["train"] for record in shown]
        values = [_value(case, size) for case in ordered]
        colour, line = COLOURS[norms.index(norm) % len(COLOURS)], LINES[int(compiled)]
        label = shown[0].name
        axes.plot(
            values, [t.ratio for t in timings], color=colour, linestyle=line, marker="o", markersize=4, label=label
        )
        low, high = [t.ratio_low for t in timings], [t.ratio_high for t in timings]
        axes.fill_between(values, low, high, color=colour, alpha=0.15, linewidth=0)
    _draw_frame(axes, size, ordered)


def _draw_frame(axes: Axes, size: str, cases: Sequence[Case]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([_value(case, size) for case in cases]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlabel(_LABELS[size])
    axes.set_title(_others(size, cases), fontsize=8, loc="left", color="#555555")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _others(size: str, cases: Sequence[Case]) -> str:
    """Say what stays the same."""
    first = cases[0]
    parts = {
        "window": f"window {first.window}" if len({case.window for case in cases}) == 1 else "the paper's window",
        "batch size": f"batch {first.batch_size}",
        "image size": f"{first.input_shape[-1]} px",
    }
    return ", ".join([first.model, *(part for name, part in parts.items() if name != size)])


def _value(case: Case, size: str) -> int:
    values = {"window": case.window, "batch size": case.batch_size, "image size": case.input_shape[-1]}
    return values[size]
