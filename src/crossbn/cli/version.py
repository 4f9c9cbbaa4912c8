"""`crossbn` without a verb: what it is, and `crossbn --version`."""

import platform
from typing import Annotated

import torch
import typer

import crossbn
from crossbn.ops import library


def installation() -> str:
    """Return the versions in one line, and in a second one what does a training step on the CPU."""
    versions = f"crossbn {crossbn.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    if library.is_available():
        return f"{versions}\nOn the CPU compiled code does a training step."
    return (
        f"{versions}\nOn the CPU torch's operators do a training step, slower than compiled code, which is missing or "
        "switched off (CROSSBN_NATIVE=0): install a wheel for your platform, or the sources with a C compiler."
    )


def _tell(wanted: bool) -> None:
    if wanted:
        typer.echo(installation())
        raise typer.Exit


def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell, is_eager=True, help="Tell versions and what is compiled.")
    ] = False,
) -> None:
    """Cross-iteration batch normalization: networks with BatchNorm that train well on tiny batches."""
    del version  # answered before a verb is asked for
