"""`crossbn diagnose`: how close the compensated statistics are to the true ones, on a model and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from crossbn.cli.extras import require
from crossbn.cli.named import MistakeError, find_function, refused
from crossbn.cli.options import DataFolder
from crossbn.cli.printing import fail, mistakes_told, print_tables, print_texts
from crossbn.lab import records as files
from crossbn.lab.data import DataError
from crossbn.schedules import window_for

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crossbn.cli.batches import Batch
    from crossbn.cli.losses import Loss
    from crossbn.lab.fidelity.probe import FidelityProbe

_OWN = "not of data of your own"
_CLASSES = 1000  # that a network tells apart, where those of the data are not known
_DEPTHS = 4  # parts of the network, where the table of all layers is too long


def diagnose(
    model: Annotated[
        str, typer.Option(help="A torchvision classifier, resnet20, plain20 and so on, or package.module:function.")
    ] = "resnet18",
    data: Annotated[
        str,
        typer.Option(
            help="A data set of `crossbn data list`, a folder of images, random, or package.module:function: called "
            "without arguments, it returns a DataLoader or anything else that yields pairs of input and target."
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
    weights: Annotated[
        str | None, typer.Option(help="Of remembered steps: auto or equal.", show_default="auto, but for order 0")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps from one measurement to the next.", show_default="steps / 10, 2 to 20"),
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of SGD with momentum 0.9.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    data_folder: DataFolder = None,
    output: Annotated[
        Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the results.")
    ] = Path("diagnose-results"),
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the tables of all layers, too.")] = False,
) -> None:
    """Train a model and measure how close the statistics that its norms remember are to the true ones.

    Compares, for each layer and age, the remembered mean and variance, as they were and moved to today's weights, with
    those of the same batch recomputed with today's weights through the same layer and through the whole network. Prints
    a recommendation and tables; writes records.jsonl, table.md and fidelity.png. Modules of your own are looked for in
    the current directory, too.
    """
    require("matplotlib")
    every = every or min(steps, max(2, steps // 10), 20)
    if steps < every:
        raise typer.BadParameter(
            f"there would be no measurement: {steps} steps, one every {every}", param_hint="--steps"
        )
    from torch import Tensor, manual_seed

    from crossbn.cli.batches import BatchSpec, find_batches
    from crossbn.cli.losses import find_loss
    from crossbn.lab.fidelity.batches import Call, count_examples
    from crossbn.lab.fidelity.probe import FidelityProbe
    from crossbn.nn import Settings

    path = output / "records.jsonl"
    with mistakes_told(DataError, MistakeError, interrupted="nothing was measured"):
        files.read(path)  # a damaged file is told before anything is measured
        build, loss_of = _find(model, data, channels, seed), find_loss(loss)
        batches = find_batches(data, BatchSpec(batch_size, channels, image_size, seed, data_folder))
        first = next(batches)
        batch_size = count_examples(Call(first[:1], {}))  # a function of one's own decides on it
        window = window or max(2, window_for(batch_size))
        with refused("--weights"):
            told = Settings(window, burn_in, order, positions or None, weights=weights or "")
        options = {name: getattr(told, name) for name in ("window", "burn_in", "order", "positions", "weights")}
        settings = {
            **{"model": model, "data": Path(data).name if Path(data).is_dir() else data, "loss": loss},
            **{"input_shape": list(first[0].shape[1:]) if isinstance(first[0], Tensor) else None},
            **{"batch_size": batch_size, **options, "learning_rate": lr, "steps": steps, "every": every},
        }
        manual_seed(seed)
        network = _network(build, options, first, loss_of)
        run = _Run(FidelityProbe(network, every=every), settings, seed, path)
        with files.locked(output), _interruption_told(run):
            _train(network, batches, loss_of, run)
        if not run.probe.records:
            fail(f"no step was remembered: the burn-in of {burn_in} lasted to the end")
        _tell(run, verbose)


@dataclass(frozen=True)
class _Run:
    probe: FidelityProbe
    settings: Mapping[str, Any]
    seed: int
    path: Path

    def keep(self) -> None:
        """Let the file have what has been found so far, in place of what an earlier run of the same has found."""
        from crossbn.lab.fidelity.records import found_values

        values = found_values(self.probe.records, self.probe.causes, self.probe.left_out)
        name = f"{self.settings['model']}, {self.settings['data']}, batch {self.settings['batch_size']}"
        files.replace_in(self.path, files.Record("diagnose", name, self.seed, self.settings, values))

    @property
    def kept(self) -> str:
        """What remains of a run that ends early."""
        return f"{self.path} has what was measured until then" if self.probe.records else "nothing was measured"


def _find(name: str, data: str, channels: int, seed: int) -> Callable[[], Any]:
    if ":" in name:
        return find_function(name, "--model", 0)
    require("torchvision", extra="train")
    from crossbn.lab.data import DATASETS
    from crossbn.lab.models import build_network, check_model

    with refused("--model"):
        check_model(name)
    classes = DATASETS[data].classes if data in DATASETS else _CLASSES
    return lambda: build_network(name, channels, classes, seed=seed)


def _network(build: Callable[[], Any], options: dict[str, Any], batch: Batch, loss: Loss) -> nn.Module:
    """Return the converted model, after a look at whether it runs."""
    from torch import nn

    from crossbn.cli.losses import compute_loss
    from crossbn.convert import convert_
    from crossbn.lab.fidelity.undisturbed import undisturbed

    network = build()
    if not isinstance(network, nn.Module):
        fail(f"the model's function returned {network!r}, which is no torch.nn.Module")
    network.train()
    with undisturbed(network):
        compute_loss(network, loss, *batch)
    report = convert_(network, example_inputs=batch[:1], **options)
    if len(report.left) == len(report.records):
        fail(f"the model has no BatchNorm that can be converted: {report.summary()}")
    return network


def _train(network: nn.Module, batches: Iterator[Batch], loss: Loss, run: _Run) -> None:
    from crossbn.cli.losses import compute_loss
    from crossbn.lab.training import Training

    def loss_of(model: nn.Module, given: Any, target: Any) -> Tensor:
        return compute_loss(model, loss, given, target)

    rate, steps = run.settings["learning_rate"], run.settings["steps"]
    training = Training(network, steps, rate, falls=False, loss=loss_of)
    # One step more than asked for, so that a measurement after the last one is made.
    for step in track(range(steps + 1), "training", console=Console(stderr=True), transient=True):
        batch = next(batches)
        if run.probe.step(batch[0]):
            run.keep()
        if step < steps:
            training.step(batch)
            if not math.isfinite(training.losses[-1]):
                raise MistakeError(
                    f"the loss is not finite in step {step + 1}: a learning rate below {rate:g} may help, or a larger "
                    f"batch; {run.kept}"
                )


def _tell(run: _Run, verbose: bool) -> None:
    """Print and write the verdict, tables and the picture."""
    from crossbn.lab.fidelity.recommendation import verdict
    from crossbn.lab.fidelity.records import average_causes
    from crossbn.lab.report.fidelity_section import plot_fidelity  # matplotlib is slow to import
    from crossbn.lab.report.fidelity_table import COLUMNS, caption, cause_table, fidelity_tables
    from crossbn.lab.report.markdown import write_markdown

    probe, output = run.probe, run.path.parent
    tables, causes = fidelity_tables(probe.records), []
    if probe.causes:
        causes = [cause_table(average_causes(probe.causes, parts)) for parts in (_DEPTHS, None)]
    sentence = verdict(probe.records, probe.causes, run.settings["window"], run.settings["burn_in"])
    text = caption(probe.records, probe.left_out, _context(run))
    pictures = {"fidelity.png": lambda: plot_fidelity(probe.records)}
    write_markdown(output / "table.md", [sentence, *tables, *causes, text], pictures, anew=True)
    print_texts(sentence)
    print_tables(tables if verbose else tables[:1], COLUMNS)
    print_tables(causes if verbose else causes[:1])
    if verbose:
        print_texts(text)
    print_texts(
        f"{output} has the record, all tables and a picture{'' if verbose else '; --verbose prints the tables'}."
    )


def _context(run: _Run) -> dict[str, str]:
    """Return what was told and used, as a caption says it."""
    from crossbn.lab import environment

    told = {name.replace("_", " "): value for name, value in run.settings.items() if value is not None}
    told |= {"positions": run.settings["positions"] or "all", "seed": run.seed}
    if shape := told.pop("input shape", None):
        told["data"] = f"{told['data']} {'x'.join(map(str, shape))}"
    made = environment.stamp()
    told |= {**made["versions"], **({"commit": made["commit"]} if made["commit"] else {}), **made["machine"]}
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in told.items()}


@contextmanager
def _interruption_told(run: _Run) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; {run.kept}")
