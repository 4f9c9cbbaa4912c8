"""`crossbn cost`: time, memory and FLOPs of the norms, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossbn.cli.extras import require
from crossbn.cli.named import check_device, find_function, refused
from crossbn.cli.printing import mistakes_told, print_tables, print_texts
from crossbn.lab import records as files
from crossbn.lab.cost import Case, CaseError, CostRecord, Precision
from crossbn.lab.cost.cases import Growth, default_threads, distinct, sweep
from crossbn.lab.cost.records import read
from crossbn.lab.cost.suites import SUITES, Goal, make_suite
from crossbn.lab.norm_names import NORM_NAMES
from crossbn.lab.report.markdown import write_markdown
from crossbn.lab.report.table import Table
from crossbn.messages import no_such
from crossbn.schedules import window_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MODEL = "resnet18"
_SIZE = "224"
_DEFAULT = Precision()
_PICTURE = "growth.png"


def cost(
    model: Annotated[
        str | None,
        typer.Option(help="A torchvision classifier, or package.module:function.", show_default=_MODEL),
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Height and width, one or several: 64,128.", show_default=_SIZE)
    ] = None,
    input_shape: Annotated[str | None, typer.Option(help="Of one example, instead of an image: 1,16000.")] = None,
    batch_size: Annotated[str | None, typer.Option(help="Examples per step, one or several.", show_default="4")] = None,
    window: Annotated[
        str | None, typer.Option(help="Steps to pool, one or several.", show_default="16 / batch size, at most 8")
    ] = None,
    norms: Annotated[
        str | None, typer.Option(help=f"To compare with bn: {', '.join(NORM_NAMES[1:])}.", show_default="bn,gn,cbn")
    ] = None,
    suite: Annotated[str | None, typer.Option(help=f"Cases that are set, with targets: {', '.join(SUITES)}.")] = None,
    positions: Annotated[
        int | None, typer.Option(min=0, help="Samples of CBN's gradients, at most; 0 for all.", show_default="128")
    ] = None,
    compile_too: Annotated[bool, typer.Option("--compile", help="Measure under torch.compile as well.")] = False,
    rounds: Annotated[int, typer.Option(min=6, help="Repetitions, at least.")] = _DEFAULT.rounds,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="No more repetitions after this time, training and inference each.")
    ] = _DEFAULT.max_seconds,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of torch.", show_default="OMP_NUM_THREADS, or the cores")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    output: Annotated[
        Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the results.")
    ] = Path("cost-results"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the records in the directory.")] = False,
) -> None:
    """Measure time, memory and FLOPs of BN, GN and CBN in one process, turn by turn.

    A training step, one in burn-in, inference, inference with the norms folded away; peak memory, history, FLOPs. Of
    several sizes each is measured with the first of the others, and growth.png shows what becomes of the ratio. Writes
    records.jsonl and table.md. Cases that records.jsonl has already are not measured again.
    """
    settings: dict[str, Any] = {
        "compile": compile_too,
        "precision": Precision(rounds=rounds, max_seconds=max_seconds),
        "threads": threads or default_threads(),
        "device": check_device(device),
    }
    if positions is not None:
        settings["positions"] = positions or None
    goals: list[Goal] = []
    growth: Growth = {}
    if suite is not None:
        given = {"--model": model, "--image-size": image_size, "--input-shape": input_shape}
        given |= {"--batch-size": batch_size, "--window": window, "--norms": norms}
        goals = _suite(suite, [name for name, value in given.items() if value is not None], settings)
        cases = [goal.case for goal in goals]
    else:
        base, growth = _sweep(model or _MODEL, image_size, input_shape, batch_size, window, norms, settings)
        cases = distinct(base, growth)
    if growth:
        require("matplotlib")
    from crossbn.lab.report.cost_table import caption, case_table, suite_table

    again = "the same command again measures the cases that are missing"
    with mistakes_told(CaseError, interrupted=again, fresh=True):
        records = _complete(cases, output, fresh)
        tables = [suite_table(goals, records)] if goals else [case_table(_of(case, records)) for case in cases]
        _write(tables, records, growth, output)
    print_tables(tables)
    print_texts(caption(records))


def _suite(name: str, given: Sequence[str], settings: dict[str, Any]) -> list[Goal]:
    if given:
        raise typer.BadParameter(f"the suite sets the cases: leave out {', '.join(given)}", param_hint="--suite")
    with refused("--suite"):
        return make_suite(name, **settings)


def _sweep(
    model: str,
    image_size: str | None,
    input_shape: str | None,
    batch_size: str | None,
    window: str | None,
    norms: str | None,
    settings: dict[str, Any],
) -> tuple[Case, Growth]:
    if input_shape is not None and image_size is not None:
        raise typer.BadParameter("give --image-size or --input-shape, not both", param_hint="--input-shape")
    images = [] if input_shape is not None else _integers(image_size or _SIZE, "--image-size")
    shape = (3, images[0], images[0]) if images else tuple(_integers(input_shape or "", "--input-shape"))
    batches = _integers(batch_size or "4", "--batch-size")
    windows = [] if window is None else _integers(window, "--window")
    names = dict.fromkeys(["bn", *(norms or "bn,gn,cbn").replace(" ", "").split(",")])
    first = windows[0] if windows else window_for(batches[0])
    with refused("--norms"):
        base = Case(model, shape, batches[0], first, tuple(names), **settings)
    return base, sweep(base, windows, batches, images)


def _integers(text: str, option: str) -> list[int]:
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise typer.BadParameter(f"needs whole numbers from 1 on, separated by commas, got {text!r}", param_hint=option)
    return values


def _complete(cases: Sequence[Case], output: Path, fresh: bool) -> list[CostRecord]:
    """Return the records of `cases`, after measuring those that are missing."""
    path = output / "records.jsonl"
    known = [] if fresh else read(path)
    found = {case: [record for record in known if record.answers(case)] for case in cases}
    todo = [case for case in cases if not found[case]]
    if len(todo) < len(cases):
        typer.echo(f"{len(cases) - len(todo)} of {len(cases)} cases are in {path} already.", err=True)
    if todo:
        _check(todo)
        with files.locked(output):
            if fresh:
                path.unlink(missing_ok=True)
            _measure(todo, path, found)
    return [record for case in cases for record in found[case]]


def _check(cases: Sequence[Case]) -> None:
    """Refuse what cannot be measured before anything is."""
    from crossbn.lab.models import check_model

    for norm in dict.fromkeys(norm for case in cases for norm in case.norms if norm not in NORM_NAMES):
        raise typer.BadParameter(no_such("norm", norm, NORM_NAMES), param_hint="--norms")
    for name in dict.fromkeys(case.model for case in cases):
        if ":" in name:
            find_function(name, "--model", arguments=0)
            continue
        require("torchvision", extra="train")
        with refused("--model"):
            check_model(name)


def _measure(todo: Sequence[Case], path: Path, found: dict[Case, list[CostRecord]]) -> None:
    from crossbn.lab.cost.measuring import measure

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(todo))
        for case in todo:

            def show(news: str, about: str = f"{case}") -> None:
                progress.update(bar, description=f"{about}: {news}")

            found[case] = measure(case, watch=show)
            files.append(path, [record.record() for record in found[case]])
            progress.advance(bar)


def _of(case: Case, records: Sequence[CostRecord]) -> list[CostRecord]:
    return [record for record in records if record.case == case]


def _write(tables: Sequence[Table], records: Sequence[CostRecord], growth: Growth, output: Path) -> None:
    from crossbn.lab.report.cost_table import caption

    def draw() -> "Figure":
        from crossbn.lab.report.cost_section import plot_growth  # matplotlib is slow to import

        return plot_growth(growth, records)

    write_markdown(output / "table.md", [*tables, caption(records)], {_PICTURE: draw} if growth else {})
