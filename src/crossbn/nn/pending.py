"""A step that will be remembered when the forward has come to its end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from crossbn.nn.history import History, Pieces


class Pending:
    """A row for a history, and whether it is to be taken."""

    def __init__(self, history: History, row: Mapping[str, Tensor | Pieces], accept: bool | Tensor) -> None:
        self._history = history
        self._row, self._accept = row, accept

    def commit(self) -> None:
        """Remember the step."""
        if torch.compiler.is_compiling():
            self._history.push(self._row, self._accept)
            return
        with self._history.lock:
            self._history.push(self._row, self._accept)
