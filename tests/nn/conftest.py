"""What tests of the layers start from."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """Fill what `to_empty` allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
