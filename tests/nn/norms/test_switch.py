"""Batch-Instance, Switchable and Sparse Switchable Normalization: gates, ratios, SparsestMax."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn.nn import BatchInstanceNorm, SparseSwitchNorm, SwitchNorm
from crossbn.nn.norms.sparsest_max import circumradius, sparsemax, sparsest_max


def simplex(count: int, fineness: int) -> Tensor:
    """All points with `count` coordinates that are multiples of 1 / fineness."""
    axis = torch.arange(fineness + 1, dtype=torch.float64)
    points = torch.cartesian_prod(*[axis] * (count - 1)).reshape(-1, count - 1)
    last = fineness - points.sum(1, keepdim=True)
    return torch.cat([points, last], 1)[last[:, 0] >= 0] / fineness


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("progress", [0.0, 0.3, 0.5, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("spread", [0.1, 0.5, 3.0])
def test_sparsest_max_is_the_nearest_point_that_is_allowed(count: int, progress: float, spread: float) -> None:
    radius = progress * circumradius(count)
    candidates = simplex(count, 200)
    candidates = candidates[(candidates - 1 / count).norm(dim=1) >= radius - 1e-12]
    for logits in torch.randn(25, count, dtype=torch.float64) * spread:
        ratios = sparsest_max(logits, torch.tensor(radius, dtype=torch.float64))
        assert ratios.min() >= 0
        assert float(ratios.sum()) == pytest.approx(1, abs=1e-12)
        assert (ratios - 1 / count).norm() >= radius - 1e-7
        assert (ratios - logits).norm() <= (candidates - logits).norm(dim=1).min() + 1e-7


def test_radius_zero_is_sparsemax() -> None:
    for logits in torch.randn(20, 3, dtype=torch.float64):
        torch.testing.assert_close(sparsest_max(logits, torch.zeros(())), sparsemax(logits))


@pytest.mark.parametrize(
    "logits", [[1.0, 1.0, 1.0], [0.5, 0.5, 0.0], [0.2, 0.7, 0.1], [1e9, 0.0, 0.0], [-3.0, 5.0, 4.9]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_circumradius_chooses_the_largest(logits: list[float], dtype: torch.dtype) -> None:
    chosen = sparsest_max(torch.tensor(logits, dtype=dtype), torch.tensor(circumradius(3)))
    assert chosen.tolist() == [float(i == logits.index(max(logits))) for i in range(3)]


@pytest.mark.parametrize("radius", [0.0, 0.2, 0.45, 0.7])
def test_gradient_of_sparsest_max(radius: float) -> None:
    logits = torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: sparsest_max(z, torch.tensor(radius, dtype=torch.float64)), logits)


@pytest.mark.parametrize("logits", [[1.0, 1.0, 1.0], [2.0, -1.0, 0.0], [0.4, 0.3, 0.3]])
@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_gradient_is_finite_even_of_ties_and_corners(logits: list[float], progress: float) -> None:
    z = torch.tensor(logits, requires_grad=True)
    sparsest_max(z, torch.tensor(progress * circumradius(3)))[0].backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    if progress == 1:
        torch.testing.assert_close(z.grad, torch.zeros(3), rtol=0, atol=1e-5)


def test_circumradius() -> None:
    corner = torch.tensor([1.0, 0, 0])
    assert float((corner - 1 / 3).norm()) == pytest.approx(circumradius(3)) == pytest.approx(math.sqrt(2 / 3))


def test_radius_grows_with_the_steps() -> None:
    norm = SparseSwitchNorm(3, steps=4)
    with torch.no_grad():
        norm.mean_logits.copy_(torch.tensor([0.3, 0.4, 0.3]))
        norm.var_logits.copy_(torch.tensor([0.34, 0.33, 0.33]))
    distances = []
    for _ in range(6):
        distances.append(float((norm.ratios(norm.mean_logits) - 1 / 3).norm().detach()))
        norm(torch.randn(2, 3, 4, 4))
    wanted = [max(step / 4 * circumradius(3), math.sqrt(2 / 300)) for step in range(5)]
    assert distances == pytest.approx([*wanted, circumradius(3)], abs=1e-6)
    assert norm.ratios(norm.mean_logits).tolist() == [0, 1, 0]
    assert norm.ratios(norm.var_logits).tolist() == [1, 0, 0]


def test_one_kind_of_statistics_is_that_norm() -> None:
    x = torch.randn(3, 4, 5, 5)
    wanted = [F.instance_norm(x), F.group_norm(x, 1), F.batch_norm(x, None, None, training=True)]
    for kind, expected in enumerate(wanted):
        norm = SwitchNorm(4)
        with torch.no_grad():
            for logits in (norm.mean_logits, norm.var_logits):
                logits.zero_()[kind] = 100
        torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)


def test_large_mean_does_not_cancel() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64) + 1000
    norm = SwitchNorm(3)
    exact = SwitchNorm(3).double()
    torch.testing.assert_close(norm(x.float()).double(), exact(x.float().double()), rtol=0, atol=2e-3)


def gated(*values: float) -> BatchInstanceNorm:
    norm = BatchInstanceNorm(len(values))
    with torch.no_grad():
        norm.gate.copy_(torch.tensor(values))
    return norm


def test_gate_chooses_between_batch_and_instance() -> None:
    x = torch.randn(3, 2, 5, 5)
    y = gated(1, 0)(x)
    torch.testing.assert_close(y[:, 0], F.batch_norm(x, None, None, training=True)[:, 0])
    torch.testing.assert_close(y[:, 1], F.instance_norm(x)[:, 1])


def test_gate_is_projected_in_training_and_clipped_in_evaluation() -> None:
    x = torch.randn(3, 2, 5, 5)
    norm, inside = gated(1.5, -0.5), gated(1, 0)
    torch.testing.assert_close(norm.eval()(x), inside.eval()(x))
    assert norm.gate.tolist() == [1.5, -0.5]
    torch.testing.assert_close(norm.train()(x), inside.train()(x))
    assert norm.gate.tolist() == [1, 0]


def test_gate_comes_back_from_the_border() -> None:
    norm = gated(1.5, -0.5)
    norm(torch.randn(3, 2, 5, 5)).square().mul(torch.rand(3, 2, 5, 5)).sum().backward()
    assert norm.gate.grad is not None
    assert (norm.gate.grad != 0).all()


def test_gate_with_accumulated_gradients() -> None:
    """A second forward before the first one's backward must not disturb it."""
    norm = gated(1.5, 0.5)
    (norm(torch.randn(3, 2, 5, 5)).sin().sum() + norm(torch.randn(3, 2, 5, 5)).sin().sum()).backward()
    assert norm.gate.grad is not None
