"""`crossbn check`: is this installation right and fast on this device?"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from crossbn.cli.cost import check_device
from crossbn.cli.extras import require
from crossbn.cli.printing import print_tables, print_texts
from crossbn.lab.check import CheckRecord, run
from crossbn.lab.records import append_lines
from crossbn.lab.report.table import Table

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
    require("torchvision", extra="vision")
    record = run(torch.device(check_device(device)), lambda name: typer.echo(f"{name} ...", err=True))
    output.mkdir(parents=True, exist_ok=True)
    append_lines(output / "records.jsonl", [record])
    print_tables(tables_of(record), 2, justify="left")
    print_texts(record.verdict, f"The record is in {output / 'records.jsonl'}.")
    if record.wrong:
        raise typer.Exit(1)


def tables_of(record: CheckRecord) -> list[Table]:
    """Return the findings as tables: a sentence each, then the ratios."""
    rows = tuple((name, _WORDS[each.passed], each.sentence) for name, each in record.findings.items())
    tables = [Table("", ("check", "", "finding"), rows)]
    costs = record.findings.get("time and memory")
    if costs is not None and costs.values:
        names = dict.fromkeys(key.rpartition(", ")[0] for key in costs.values)
        ratios = tuple(
            (name, *(f"{costs.values[f'{name}, {kind}']:.2f}" for kind in ("time", "memory"))) for name in names
        )
        tables.append(Table("Of BatchNorm's", ("step", "time", "peak memory"), ratios))
    return tables
