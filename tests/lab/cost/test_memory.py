import os
import sys

import pytest
import torch
from torch import Tensor

from crossbn.lab.cost.memory import peak_above_start

CPU = torch.device("cpu")
kept: list[Tensor] = []


def overlapping() -> None:
    """4000 bytes, then 8000 more, then 2000 instead of the first 4000."""
    first = torch.empty(1000)
    second = torch.empty(2000)
    del first
    third = torch.empty(500)
    del second, third


def one_after_the_other() -> None:
    for _ in range(5):
        torch.empty(1000)


def replaced() -> None:
    kept.clear()
    kept.append(torch.empty(1000))


def replaced_late() -> None:
    kept.append(torch.empty(1000))
    del kept[:-1]


def test_by_hand() -> None:
    assert peak_above_start(overlapping, CPU) == 12_000
    assert peak_above_start(one_after_the_other, CPU) == 4_000
    assert peak_above_start(replaced, CPU) == 0
    assert peak_above_start(replaced_late, CPU) == 4_000
    assert peak_above_start(lambda: None, CPU) == 0


def test_backward_by_hand() -> None:
    """Two saved results and a gradient are the most at once; the old gradient of x is there at the start."""
    x = torch.ones(10_000, requires_grad=True)

    def step() -> None:
        x.grad = None
        x.exp().exp().sum().backward()

    found = peak_above_start(step, CPU)
    assert 2 * 40_000 <= found <= 2 * 40_000 + 100  # and a few scalars


def test_stderr_is_quiet_and_then_back(capfd: pytest.CaptureFixture[str]) -> None:
    peak_above_start(replaced, CPU)
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"
    with pytest.raises(ZeroDivisionError):
        peak_above_start(lambda: 1 // 0, CPU)
    print("again", file=sys.stderr, end="")
    assert capfd.readouterr().err == "again"
