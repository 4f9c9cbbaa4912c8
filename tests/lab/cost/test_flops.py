"""Counts against counts by hand; E is the number of elements that a norm normalizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from crossbn import convert_
from crossbn.lab.cost.flops import StepFlops, count_step
from crossbn.lab.cost.records import Flops
from crossbn.ops import library

BATCH, IN, OUT, PIXELS = 2, 3, 8, 10 * 10
E = BATCH * OUT * PIXELS
CONVOLUTION = 2 * E * IN * 9


def count(norm: nn.Module, window: int | None = None) -> StepFlops:
    model = nn.Sequential(nn.Conv2d(IN, OUT, 3, bias=False), norm)
    if window is not None:
        convert_(model, window=window, positions=20, weights="equal")
    x = torch.randn(BATCH, IN, 12, 12)
    for _ in range(4):
        model(x).sum().backward()
    with library.switched_off():  # as when it is counted, so that the tables of each slot are there already
        for _ in range(window or 1):
            model(x).sum().backward()
    model.zero_grad()
    return count_step(lambda: model(x).sum())


def own(norm: nn.Module, window: int | None = None) -> Flops:
    return count(norm, window).total - count(nn.Identity()).total


def test_network_by_hand() -> None:
    # The input needs no gradient, so backward is the weight's alone; the loss sums E numbers.
    assert count(nn.Identity()) == StepFlops(Flops(CONVOLUTION, CONVOLUTION), Flops(E, 0))


@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        (nn.Conv2d(4, 8, 3, bias=False), 2 * 2 * 16 * 8 * 4 * 9),
        (nn.Conv2d(4, 8, 3, groups=2, bias=False), 2 * 2 * 16 * 8 * 2 * 9),
        (nn.Conv2d(4, 4, 3, groups=4, bias=False), 2 * 2 * 16 * 4 * 9),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), 2 * 2 * 36 * 4 * 3 * 9),
    ],
)
def test_convolutions_by_hand(layer: nn.Module, forward: int) -> None:
    x = torch.ones(2, 4, 6, 6)
    assert count_step(lambda: layer(x).sum()).products == Flops(forward, forward)
    x.requires_grad_()
    assert count_step(lambda: layer(x).sum()).products == Flops(forward, 2 * forward)


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (lambda: nn.BatchNorm2d(OUT), 6, 9),
        (lambda: nn.BatchNorm2d(OUT).eval(), 2, 5),  # gamma's and beta's sums and one product
        (lambda: nn.GroupNorm(4, OUT), 6, 7),
        (lambda: nn.LayerNorm((OUT, 10, 10)), 8, 13),
    ],
)
def test_norms_by_hand(make: Callable[[], nn.Module], forward: int, backward: int) -> None:
    assert own(make()) == Flops(forward * E, backward * E)


def test_window_1_is_batch_norm_and_a_look_at_its_moments() -> None:
    found = own(nn.BatchNorm2d(OUT), window=1)
    assert 6 * E <= found.forward <= 6 * E + 4 * OUT
    assert found.backward == 9 * E


def test_large_weights_meet_their_samples_in_both_directions() -> None:
    conv = nn.Conv2d(64, 64, 3, bias=False)  # a weight that keeps samples: 10 of a step and the mean patch
    model = nn.Sequential(conv, nn.BatchNorm2d(64))
    x = torch.randn(2, 64, 6, 6)
    without = count_step(lambda: conv(x).sum()).products
    convert_(model, window=4)
    for _ in range(4):
        model(x).sum().backward()
    model.zero_grad()
    of_a_step, mean_patch = 2 * (1 + 10) * conv.weight.numel(), 2 * 64 * (36 * 3 + 18 * 3)  # 3 taps by 3
    # Three remembered steps in both directions, and today's, which will be.
    expected = Flops(4 * of_a_step + mean_patch, 3 * of_a_step)
    assert count_step(lambda: model(x).sum()).products - without == expected


def test_cross_iteration_grows_linearly_with_the_window() -> None:
    two, three, four = (own(nn.BatchNorm2d(OUT), window) for window in (2, 3, 4))
    assert three - two == four - three
    # At least: each remembered step is projected on the weights, and summed for the gradient through it.
    weights = OUT * IN * 9
    assert (three - two).forward >= 4 * weights
    # At least: batch norm, and the gradient of 20 sampled positions.
    assert two.forward >= 6 * E + 2 * 20 * weights
    assert two.backward >= 9 * E + 2 * weights


@pytest.mark.parametrize(
    ("work", "flops"),
    [
        (lambda x: x + x, 12),
        (lambda x: x.add_(1), 12),
        (lambda x: torch.addcmul(x, x, x), 24),
        (lambda x: x.lerp(x, 0.5), 36),
        (lambda x: x.sum(0), 12),
        (lambda x: x[:1] * x, 12),
        (lambda x: x.var(0), 48),
        (lambda x: torch.var_mean(x, 0)[0], 48),
        (lambda x: torch.batch_norm_update_stats(x, None, None, 0.1)[0], 48),
        (lambda x: x @ x[0], 24),
        (lambda x: torch.linalg.vecdot(x[0], x[1]), 8),
        (lambda x: torch._foreach_mul([x, x[0]], 2.0)[0], 16),
        (lambda x: x.long() + 1, 0),
        (lambda x: torch.relu(x).flatten()[x.flatten() > 0].clone(), 0),
    ],
)
def test_operators(work: Callable[[Tensor], Tensor], flops: int) -> None:
    parameter = torch.zeros((), requires_grad=True)

    def forward() -> Tensor:
        with torch.no_grad():
            work(torch.ones(3, 4))
        return parameter.clone()

    assert count_step(forward).total == Flops(flops, 0)


def test_lists_are_counted_in_place_too() -> None:
    parameter = torch.zeros((), requires_grad=True)

    def forward() -> Tensor:
        torch._foreach_add_([torch.ones(3), torch.ones(4)], 1.0)
        return parameter.clone()

    assert count_step(forward).total == Flops(7, 0)
