from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from crossbn.cli import extras, main, make_app
from crossbn.cli import demo as verb
from crossbn.experiments.records import Record, Run, read_records
