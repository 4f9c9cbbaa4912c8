"""`crossbn diagnose`: how close the compensated statistics are to the true ones, on a model and data."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from crossbn.cli.batches import NAMES, Batch, Wish, find_batches
from crossbn.cli.extras import require
from crossbn.cli.folding import fold_names
from crossbn.cli.losses import Loss, compute_loss, find_loss
from crossbn.cli.mistakes import MistakeError
from crossbn.cli.named import find_function
from crossbn.cli.printing import fail, print_tables, print_texts
from crossbn.convert import convert_
from crossbn.lab.cost import surroundings
from crossbn.lab.cost.models import Build, find_model
from crossbn.lab.data import FOLDER_VARIABLE, DataError
from crossbn.lab.fidelity import FidelityProbe, FidelityRecord
from crossbn.lab.fidelity.batches import Call, count_examples
from crossbn.lab.fidelity.causes import CAUSES, average_causes
from crossbn.lab.fidelity.fidelity_records import append_records
from crossbn.lab.fidelity.undisturbed import undisturbed
from crossbn.lab.report.fidelity_table import COLUMNS, advice, caption, cause_table, fidelity_tables
from crossbn.lab.report.table import Table
from crossbn.schedules import window_for

_OWN = "not of data of your own"


def diagnose(
    model: Annotated[str, typer.Option(help="A torchvision classifier, or package.module:function.")] = "resnet18",
    data: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(NAMES)}, or package.module:function: called without arguments, it returns a "
            "DataLoader or anything else that yields pairs of input and target."
        ),
    ] = "digits",
    loss: Annotated[
        str | None,
        typer.Option(help="package.module:function of output and target.", show_default="cross entropy"),
    ] = None,
    image_size: Annotated[int, typer.Option(min=1, help=f"Height and width; {_OWN}.")] = 64,
    channels: Annotated[
        int, typer.Option(min=1, help=f"Of the images; grey ones are repeated, coloured ones averaged for 1; {_OWN}.")
    ] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help=f"Images per step; {_OWN}.")] = 4,
    window: Annotated[
        int | None, typer.Option(min=2, help="Steps to pool.", show_default="16 / batch size, 2 to 8")
    ] = None,
    burn_in: Annotated[int, typer.Option(min=0, help="Steps of plain BatchNorm first.")] = 0,
    order: Annotated[int, typer.Option(min=0, max=2, help="Of the compensation.")] = 1,
    positions: Annotated[int, typer.Option(min=0, help="Samples of the gradients, at most; 0 for all.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps from one measurement to the next.", show_default="steps / 10, 2 to 20"),
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of SGD with momentum 0.9.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    data_folder: Annotated[
        Path | None, typer.Option(help="Directory of the data sets.", envvar=FOLDER_VARIABLE, show_default="data")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the results.")
    ] = Path("diagnose-results"),
) -> None:
    """Train a model and measure how close the statistics that its norms remember are to the true ones.

    Compares, for each layer and age, the remembered mean and variance, as they were and moved to today's weights, with
    those of the same batch recomputed with today's weights through the same layer and through the whole network. Prints
    tables and a recommendation; writes records.jsonl, context.json, table.md and fidelity.png. Modules of your own are
    looked for in the current directory, too.
    """
    require("matplotlib")
    every = every or min(steps, max(2, steps // 10), 20)
    if steps < every:
        raise typer.BadParameter(
            f"there would be no measurement: {steps} steps, one every {every}", param_hint="--steps"
        )
    build, loss_of = _find(model), find_loss(loss)
    with _mistakes_told():
        batches = find_batches(data, Wish(batch_size, channels, image_size, seed, data_folder))
        given, target = next(batches)
        batch_size = count_examples(Call((given,), {}))  # a function of one's own decides on it
        window = window or max(2, window_for(batch_size))
        context = {
            "model": model,
            "data": f"{data} {'x'.join(map(str, given.shape[1:]))}" if isinstance(given, Tensor) else data,
            **({} if loss is None else {"loss": loss}),
            "batch size": f"{batch_size}",
            "window": f"{window}",
            "burn-in": f"{burn_in}",
            "order": f"{order}",
            "positions": f"{positions or 'all'}",
            "learning rate": f"{lr:g}",
            "steps": f"{steps}",
            "seed": f"{seed}",
            **surroundings.versions(),
            "commit": surroundings.commit(),
            **surroundings.machine("cpu"),
        }
        settings = {"window": window, "burn_in": burn_in, "order": order, "positions": positions or None}
        torch.manual_seed(seed)
        network = _network(build, settings, (given, target), loss_of)
        path = _prepare(output, context)
        probe = FidelityProbe(network, every=every)
        with _interruption_told(path):
            _train(network, batches, loss_of, probe, steps, lr, path)
        if not probe.records:
            fail(f"no step was remembered: the loss diverged, or the burn-in of {burn_in} lasted to the end")
        tables, sentence = fidelity_tables(probe.records), advice(probe.records, window, burn_in)
        causes = [cause_table(average_causes(probe.causes))] if probe.causes else []
        text = caption(probe.records, probe.left_out, context)
        _write([*tables, *causes], sentence, text, probe.records, output)
    width = Console().width
    print_tables([fold_names(table, COLUMNS, width) for table in tables], COLUMNS, no_wrap=True)
    print_tables([fold_names(table, len(CAUSES) + 1, width) for table in causes], len(CAUSES) + 1, no_wrap=True)
    print_texts(text, sentence)


def _find(name: str) -> Build:
    if ":" in name:
        return find_function(name, "--model", 0)
    require("torchvision", extra="vision")
    try:
        return find_model(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None


def _network(build: Build, settings: dict[str, Any], batch: Batch, loss: Loss) -> nn.Module:
    """Return the converted model, after a look at whether it runs."""
    network = build()
    if not isinstance(network, nn.Module):
        fail(f"the model's function returned {network!r}, which is no torch.nn.Module")
    network.train()
    with undisturbed(network):
        compute_loss(network, loss, *batch)
    report = convert_(network, example_inputs=batch[:1], **settings)
    if len(report.left) == len(report.records):
        fail(f"the model has no BatchNorm that can be converted: {report.summary()}")
    return network


def _prepare(output: Path, context: dict[str, str]) -> Path:
    """Return the file of the records, of which there are none yet."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "records.jsonl"
    path.unlink(missing_ok=True)
    (output / "context.json").write_text(f"{json.dumps(context, indent=2)}\n", encoding="utf-8")
    return path


def _train(
    network: nn.Module, batches: Iterator[Batch], loss: Loss, probe: FidelityProbe, steps: int, lr: float, path: Path
) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=0.9)
    # One step more than asked for, so that a measurement after the last one is made.
    for step in track(range(steps + 1), "training", console=Console(stderr=True), transient=True):
        given, target = next(batches)
        append_records(path, probe.step(given))
        if step < steps:
            optimizer.zero_grad()
            compute_loss(network, loss, given, target).backward()
            optimizer.step()


def _write(tables: Sequence[Table], sentence: str, text: str, records: Sequence[FidelityRecord], output: Path) -> None:
    from crossbn.lab.report.fidelity_figure import plot_fidelity  # matplotlib is slow to import
    from crossbn.lab.report.figure import save_png

    page = "\n\n".join([sentence, *(table.markdown() for table in tables), text])
    (output / "table.md").write_text(f"{page}\n", encoding="utf-8")
    save_png(plot_fidelity(records), output / "fidelity.png")


@contextmanager
def _interruption_told(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; {path} has what was measured until then")


@contextmanager
def _mistakes_told() -> Iterator[None]:
    """End the command with a sentence for what is not the program's fault."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted; nothing was measured")
    except (DataError, MistakeError) as error:
        fail(str(error))
    except OSError as error:  # decoders raise theirs without a number
        fail(f"{error.strerror}: {error.filename}" if error.strerror else str(error).partition("\n")[0])
