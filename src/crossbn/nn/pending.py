"""A step that will be remembered when the forward has come to its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crossbn.nn.history import History, Row


class Pending:
    """A row for a history, whether it is to be taken, and what to call afterwards, when its memory is free again."""

    def __init__(
        self, history: History, row: Row, accept: bool | Tensor, afterwards: Callable[[], None] | None = None
    ) -> None:
        self._history = history
        self._row, self._accept = row, accept
        self._afterwards = afterwards

    def commit(self) -> None:
        """Remember the step."""
        if torch.compiler.is_compiling():
            self._history.push(self._row, self._accept)
            return
        with self._history.lock:
            self._history.push(self._row, self._accept)
        if self._afterwards is not None:
            self._afterwards()
