"""What every test starts from."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton asks for it when kernels are defined: without a card they are interpreted, in all test processes alike.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that test processes end together."""
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors gain nothing from more, and results must not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
