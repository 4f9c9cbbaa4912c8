"""`crossbn` without a verb: what it is, and `crossbn --version`."""

from typing import Annotated

import typer

from crossbn.lab import environment


def installation() -> str:
    """Return the versions in one line, and in a second one what does a training step on the CPU."""
    found = environment.versions()
    versions = f"crossbn {found['crossbn']}, torch {found['torch']}, Python {found['python']}"
    if environment.has_compiled_code():
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
