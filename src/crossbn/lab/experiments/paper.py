"""The numbers of "Cross-Iteration Batch Normalization", CVPR 2021, of the tables and figures that can be run here."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

Rows = Mapping[str, Mapping[str, float]]
"""By row, then by the name of the measure."""


@cache
def _read() -> dict[str, dict[str, Any]]:
    return json.loads(resources.files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))


def numbers(name: str) -> Rows:
    """Return the paper's numbers of an experiment; none if it has none.

    Example:
        >>> numbers("batch_size")["batch 4"]["CBN"], numbers("weights")
        (70.0, {})
    """
    return _read().get(name, {"rows": {}})["rows"]


def about(name: str) -> str:
    """Say what the paper's numbers are, or that there are none."""
    return _read().get(name, {"about": "The paper has no such table."})["about"]
