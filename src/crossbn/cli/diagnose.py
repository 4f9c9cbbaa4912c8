"""`crossbn diagnose`: how close the compensated statistics are to the true ones, on a model and data."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from crossbn.analysis import FidelityProbe, FidelityRecord, recommend
from crossbn.analysis.fidelity_records import append_records
from crossbn.analysis.undisturbed import undisturbed
from crossbn.cli.extras import require
from crossbn.cli.printing import fail, print_tables, print_texts
from crossbn.convert import convert_
from crossbn.cost import surroundings
from crossbn.cost.models import Build, find_model
from crossbn.report.fidelity_table import COLUMNS, caption, fidelity_tables
from crossbn.report.table import Table
from crossbn.schedules import window_for

DATA = ("digits", "random")
_CLASSES = 10

Images = Iterator[tuple[Tensor, Tensor]]


def diagnose(
    model: Annotated[str, typer.Option(help="A torchvision classifier, or package.module:function.")] = "resnet18",
    data: Annotated[str, typer.Option(help="digits (scikit-learn's, enlarged) or random.")] = "digits",
    image_size: Annotated[int, typer.Option(min=1, help="Height and width.")] = 64,
    channels: Annotated[int, typer.Option(min=1, help="Of the images; digits are repeated.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step.")] = 4,
    window: Annotated[
        int | None, typer.Option(min=2, help="Steps to pool.", show_default="16 / batch size, 2 to 8")
    ] = None,
    burn_in: Annotated[int, typer.Option(min=0, help="Steps of plain BatchNorm first.")] = 0,
    order: Annotated[int, typer.Option(min=0, max=2, help="Of the compensation.")] = 1,
    positions: Annotated[int, typer.Option(min=0, help="Samples of the gradients, at most; 0 for all.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    every: Annotated[int, typer.Option(min=1, help="Steps from one measurement to the next.")] = 20,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of SGD with momentum 0.9.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the results.")
    ] = Path("diagnose-results"),
) -> None:
    """Train a model and measure how close the statistics that its norms remember are to the true ones.

    Compares, for each layer and age, the remembered mean and variance, as they were and moved to today's weights, with
    those of the same batch recomputed with today's weights through the same layer and through the whole network. Prints
    tables and a recommendation; writes records.jsonl, context.json, table.md and fidelity.png.
    """
    require("matplotlib")
    images, build = _images(data, batch_size, channels, image_size, seed), _find(model)
    window = window or max(2, window_for(batch_size))
    if steps < every:
        raise typer.BadParameter(
            f"there would be no measurement: {steps} steps, one every {every}", param_hint="--steps"
        )
    context = {
        "model": model,
        "data": f"{data} {channels}x{image_size}x{image_size}",
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
    with _mistakes_told(output):
        output.mkdir(parents=True, exist_ok=True)
        (output / "records.jsonl").unlink(missing_ok=True)
        (output / "context.json").write_text(f"{json.dumps(context, indent=2)}\n", encoding="utf-8")
        torch.manual_seed(seed)
        network = _network(build, settings, next(images)[0])
        probe = FidelityProbe(network, every=every)
        _train(network, images, probe, steps, lr, output / "records.jsonl")
        if not probe.records:
            fail(f"no step was remembered: the loss diverged, or the burn-in of {burn_in} lasted to the end")
        tables, sentence = fidelity_tables(probe.records), str(recommend(probe.records, window, burn_in))
        text = caption(probe.records, probe.left_out, context)
        _write(tables, sentence, text, probe.records, output)
    print_tables(tables, COLUMNS)
    print_texts(text, sentence)


def _images(data: str, batch_size: int, channels: int, size: int, seed: int) -> Images:
    if data not in DATA:
        raise typer.BadParameter(f"there is no data {data!r}, there is {', '.join(DATA)}", param_hint="--data")
    if data == "digits":
        require("sklearn")
    return (_digits if data == "digits" else _random)(batch_size, channels, size, torch.Generator().manual_seed(seed))


def _digits(batch_size: int, channels: int, size: int, generator: torch.Generator) -> Images:
    """Yield batches of scikit-learn's digits without end, mean and variance about 0 and 1."""
    from crossbn.experiments.digits import TRAIN_IMAGES, load_digits

    pixels, digits = load_digits(TRAIN_IMAGES)[0]
    pixels = (pixels - pixels.mean()) / pixels.std()
    while True:
        index = torch.randint(len(digits), (batch_size,), generator=generator)
        batch = F.interpolate(pixels[index], (size, size), mode="bilinear", align_corners=False)
        yield batch.repeat(1, channels, 1, 1), digits[index]


def _random(batch_size: int, channels: int, size: int, generator: torch.Generator) -> Images:
    """Yield batches of noise without end, labelled at random."""
    while True:
        batch = torch.randn(batch_size, channels, size, size, generator=generator)
        yield batch, torch.randint(_CLASSES, (batch_size,), generator=generator)


def _find(name: str) -> Build:
    if "" not in sys.path:
        sys.path.insert(0, "")  # models of one's own are looked for where one stands, as `python -m` does
    if ":" not in name:
        require("torchvision", extra="vision")
    try:
        return find_model(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None


def _network(build: Build, settings: dict[str, Any], example: Tensor) -> nn.Module:
    """Return the converted model, after a look at whether it runs."""
    network = build().train()
    try:
        with undisturbed(network):
            network(example)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        fail(f"the model does not run with images {tuple(example.shape)}: {reason}")
    report = convert_(network, example_inputs=(example,), **settings)
    if len(report.left) == len(report.records):
        fail(f"the model has no BatchNorm that can be converted: {report.summary()}")
    return network


def _train(network: nn.Module, images: Images, probe: FidelityProbe, steps: int, lr: float, path: Path) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=0.9)
    # One step more than asked for, so that a measurement after the last one is made.
    for step in track(range(steps + 1), "training", console=Console(stderr=True), transient=True):
        batch, target = next(images)
        append_records(path, probe.step(batch))
        if step < steps:
            optimizer.zero_grad()
            scores = network(batch)
            F.cross_entropy(scores if isinstance(scores, Tensor) else scores[0], target).backward()
            optimizer.step()


def _write(tables: Sequence[Table], sentence: str, text: str, records: Sequence[FidelityRecord], output: Path) -> None:
    from crossbn.report.fidelity_figure import plot_fidelity  # matplotlib is slow to import
    from crossbn.report.figure import save_png

    page = "\n\n".join([sentence, *(table.markdown() for table in tables), text])
    (output / "table.md").write_text(f"{page}\n", encoding="utf-8")
    save_png(plot_fidelity(records), output / "fidelity.png")


@contextmanager
def _mistakes_told(output: Path) -> Iterator[None]:
    """End the command with a sentence for what is not the program's fault."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; {output / 'records.jsonl'} has what was measured until then")
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}")
