"""Options that several commands have, with one meaning in all of them."""

from pathlib import Path
from typing import Annotated

import typer

from crossbn.lab.data import FOLDER_VARIABLE

DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data-folder",
        metavar="DIR",
        help="Where data sets are looked for.",
        envvar=FOLDER_VARIABLE,
        show_default="data",
    ),
]
