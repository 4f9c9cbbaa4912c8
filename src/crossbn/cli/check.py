"""`crossbn check`: is this installation right and fast on this device?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossbn.cli.extras import require
from crossbn.cli.named import check_device
from crossbn.cli.printing import mistakes_told, print_tables, print_texts
from crossbn.lab import records
from crossbn.lab.report.table import Table

if TYPE_CHECKING:
    from crossbn.lab.check.finding import Finding

_WORDS = {True: "right", False: "wrong", None: "-"}


def check(
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    output: Annotated[Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the record.")] = Path(
        "check-results"
    ),
) -> None:
    """Check whether cross-iteration norms are right and fast on this device.

    Operators against the reference, synchronizations, launches, a CUDA graph, time and memory beside BN and GN. Adds
    the record to records.jsonl, to keep or to send. Ends with status 1 if something is wrong.
    """
    require("torchvision", extra="train")
    place, path = check_device(device), output / "records.jsonl"
    import torch

    from crossbn.lab.check import failed, run, to_record

    with mistakes_told(interrupted="nothing was kept"):
        records.read(path)  # a damaged file is told before anything is measured
        with records.locked(output):
            findings = run(torch.device(place), lambda name: typer.echo(f"{name} ...", err=True))
            record = to_record(findings, place)
            records.append(path, [record])
    print_tables(tables_of(findings), justify="left")
    print_texts(record.values["verdict"], f"The record is in {path}.")
    if failed(findings):
        raise typer.Exit(1)


def tables_of(findings: Mapping[str, Finding]) -> list[Table]:
    """Return the findings as tables: a sentence each, then the ratios."""
    rows = tuple((name, _WORDS[each.passed], each.sentence) for name, each in findings.items())
    tables = [Table("", ("check", "", "finding"), rows)]
    costs = findings.get("time and memory")
    if costs is not None and costs.values:
        names = dict.fromkeys(key.rpartition(", ")[0] for key in costs.values)
        ratios = tuple(
            (name, *(f"{costs.values[f'{name}, {kind}']:.2f}" for kind in ("time", "memory"))) for name in names
        )
        tables.append(Table("Of BatchNorm's", ("step", "time", "peak memory"), ratios))
    return tables
