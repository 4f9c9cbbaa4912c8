"""Batch Renormalization: schedule, clipping, and what training and evaluation have in common."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbn.nn import BatchRenorm, Ramp, RenormSchedule


def batch(scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return torch.randn(4, 3, 5, 5, dtype=torch.float64) * scale + shift


def at(step: int, **options: Any) -> BatchRenorm:
    norm = BatchRenorm(3, dtype=torch.float64, **options)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.fill_(step)
    return norm


@pytest.mark.parametrize(
    ("step", "r_max", "d_max"),
    [(0, 1, 0), (5_000, 1, 0), (15_000, 11 / 7, 2.5), (25_000, 15 / 7, 5), (40_000, 3, 5), (10**6, 3, 5)],
)
def test_schedule_of_the_paper(step: int, r_max: float, d_max: float) -> None:
    schedule = RenormSchedule()
    assert schedule.r_max(step) == pytest.approx(r_max)
    assert schedule.d_max(step) == pytest.approx(d_max)
    assert schedule.scaled(0.01).d_max(step / 100) == pytest.approx(d_max)
    assert float(schedule.r_max(torch.tensor(step))) == pytest.approx(r_max)


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (5, 4), (-1, 4)])
def test_ramp_that_does_not_rise(start: float, stop: float) -> None:
    with pytest.raises(ValueError, match=f"0 <= start < stop, got {start} and {stop}"):
        Ramp(0, 1, start, stop)


def test_it_begins_as_batchnorm() -> None:
    norm, plain = at(0), nn.BatchNorm2d(3, dtype=torch.float64)
    for _ in range(3):
        x = batch(5, 7)
        torch.testing.assert_close(norm(x), plain(x), rtol=1e-12, atol=1e-12)


def test_unclipped_training_is_evaluation() -> None:
    """r and d undo the batch's statistics: what is left is normalization by the running ones."""
    norm = at(100_000)
    with torch.no_grad():
        assert norm.running_var is not None
        norm.running_var.fill_(2)
    x = batch(1.5, 0.5)
    evaluated = norm.eval()(x)
    torch.testing.assert_close(norm.train()(x), evaluated, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("scale", "shift", "r", "d"), [(100, 0, 3, None), (0.01, 0, 1 / 3, None), (1, 50, None, 5), (1, -50, None, -5)]
)
def test_clipping(scale: float, shift: float, r: float | None, d: float | None) -> None:
    x = batch(scale, shift)
    y = at(100_000)(x).transpose(0, 1).flatten(1)
    if r is not None:
        torch.testing.assert_close(y.std(1, correction=0), torch.full_like(y[:, 0], r), rtol=0.06, atol=0)
    if d is not None:
        torch.testing.assert_close(y.mean(1), torch.full_like(y[:, 0], d), rtol=1e-9, atol=0)


def test_no_gradient_through_the_correction() -> None:
    """With r and d constant, the gradient is BatchNorm's times r: nothing along the batch's mean or scale."""
    x = batch(1.5, 0.5).requires_grad_()
    direction = torch.randn_like(x)
    (at(100_000)(x) * direction).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.sum((0, 2, 3)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-10)


def test_standard_deviations_are_averaged() -> None:
    norm = at(0, momentum=0.25, eps=0.01)
    stds = []
    for scale in (1, 4, 2):
        x = batch(scale)
        norm(x)
        stds.append(torch.sqrt(x.var((0, 2, 3), correction=0) + 0.01))
    expected = torch.full_like(stds[0], 1.01).sqrt()
    for std in stds:
        expected = expected * 0.75 + std * 0.25
    assert norm.running_var is not None
    torch.testing.assert_close(torch.sqrt(norm.running_var + 0.01), expected, rtol=1e-12, atol=0)


def test_steps_are_counted_and_saved() -> None:
    norm = BatchRenorm(3)
    for _ in range(3):
        norm(batch().float())
    norm.eval()(batch().float())
    assert int(norm.state_dict()["num_batches_tracked"]) == 3
