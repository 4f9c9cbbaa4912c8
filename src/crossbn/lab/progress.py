"""How a run tells where it stands."""

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """Where a run stands."""

    share: float
    """How much of it is done, 0 to 1."""
    phrase: str
    """What is being done, or the latest number."""


Watch = Callable[[Progress], None]
