"""Kalman Normalization: the filter against samples, the chain against a slow reference."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from crossbn.nn import KalmanNorm
from crossbn.nn.norms.kalman_filter import Estimate, correct, predict, rectified

Double = torch.float64


def test_rectified_gaussian_against_samples() -> None:
    mean, var = torch.tensor([-3.0, -0.5, 0.0, 2.0], dtype=Double), torch.tensor([1.0, 4.0, 0.25, 9.0], dtype=Double)
    samples = (torch.randn(400_000, 4, dtype=Double) * var.sqrt() + mean).relu()
    got = rectified(Estimate(mean, var))
    torch.testing.assert_close(got.mean, samples.mean(0), rtol=0.05, atol=2e-3)
    torch.testing.assert_close(got.var, samples.var(0), rtol=0.05, atol=2e-3)


@pytest.mark.parametrize(
    "operator",
    [
        lambda: nn.Conv2d(4, 6, 3, bias=False),
        lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2),
        lambda: nn.Conv2d(4, 4, 3, groups=4),
        lambda: nn.Linear(4, 3),
        lambda: nn.Conv1d(4, 2, 5),
        lambda: parametrizations.weight_norm(nn.Conv3d(4, 2, 2)),
    ],
)
def test_prediction_against_samples(operator: Callable[[], nn.Module]) -> None:
    producer = operator().double()
    mean, var = torch.randn(4, dtype=Double), torch.rand(4, dtype=Double) + 0.5
    weight = producer.get_parameter("weight") if "weight" in producer._parameters else producer.weight
    assert isinstance(weight, Tensor)
    shape = [30_000, 4] if isinstance(producer, nn.Linear) else [3_000, 4, *[6] * (weight.ndim - 2)]
    spread = [1, 4, *[1] * (len(shape) - 2)]
    samples = producer((torch.randn(shape, dtype=Double) * var.sqrt().reshape(spread) + mean.reshape(spread)).relu())
    got = predict(Estimate(mean, var), producer)
    channels = samples.transpose(0, 1).flatten(1)
    torch.testing.assert_close(got.mean, channels.mean(1), rtol=0.1, atol=0.03)
    torch.testing.assert_close(got.var, channels.var(1), rtol=0.1, atol=0.03)


def test_blend_is_the_mixture_of_both_distributions() -> None:
    predicted = Estimate(torch.tensor([1.0, -2.0], dtype=Double), torch.tensor([4.0, 1.0], dtype=Double))
    observed = Estimate(torch.tensor([3.0, 0.0], dtype=Double), torch.tensor([1.0, 2.0], dtype=Double))
    got = correct(predicted, observed, 0.25)
    parts = [(0.75, predicted), (0.25, observed)]
    mean = sum(share * part.mean for share, part in parts)
    second = sum(share * (part.var + part.mean.square()) for share, part in parts)
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(got.mean, mean)
    torch.testing.assert_close(got.var, second - mean.square())


@pytest.mark.parametrize(("var", "believed"), [(99.0, True), (101.0, False)])
def test_absurd_prediction_is_not_believed(var: float, believed: bool) -> None:
    observed = Estimate(torch.zeros(2), torch.ones(2))
    got = correct(Estimate(torch.zeros(2), torch.full((2,), var)), observed, 0.5)
    assert torch.equal(got.var, torch.full((2,), (1 + var) / 2) if believed else observed.var)


def test_prediction_helps_where_a_channel_has_no_variance() -> None:
    observed = Estimate(torch.zeros(2), torch.tensor([0.0, 1.0]))
    got = correct(Estimate(torch.zeros(2), torch.ones(2)), observed, 0.1)
    torch.testing.assert_close(got.var, torch.tensor([0.9, 1.0]))


class Chain(nn.Module):
    """Two chained norms and a third on a branch of its own, which follows the first."""

    def __init__(self, gain: float = 0.3) -> None:
        super().__init__()
        self.stem, self.conv, self.branch = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(3, 4, 3)
        self.first, self.second, self.third = (KalmanNorm(c, gain=gain) for c in (3, 4, 4))
        self.second.follow_(self.first, self.conv)
        self.third.follow_(self.first, self.branch)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x)).relu()
        out: Tensor = self.second(self.conv(x)) + self.third(self.branch(x))
        return out


def chain(gain: float = 0.3) -> Chain:
    model = Chain(gain).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def batch() -> Tensor:
    return torch.randn(2, 2, 8, 8, dtype=Double)


def slow(model: Chain, x: Tensor, gain: float) -> Tensor:
    """The chain once more, channel by channel."""

    def moments(values: Tensor) -> tuple[Tensor, Tensor]:
        return values.mean(), values.var(correction=0)

    def normalized(values: Tensor, mean: Tensor, var: Tensor, norm: KalmanNorm, c: int) -> Tensor:
        return (values - mean) / torch.sqrt(var + norm.eps) * norm.weight[c] + norm.bias[c]

    def follow(conv: nn.Conv2d, norm: KalmanNorm, features: Tensor, state: list[tuple[Tensor, Tensor]]) -> Tensor:
        outputs, channels = conv(features), []
        for c in range(4):
            mean, var = torch.zeros((), dtype=Double), torch.zeros((), dtype=Double)
            for i, (m, v) in enumerate(state):
                s = v.sqrt()
                above = (1 + torch.erf(m / s / math.sqrt(2))) / 2
                density = torch.exp(-((m / s) ** 2) / 2) / math.sqrt(2 * math.pi)
                expected = m * above + s * density
                for w in conv.weight[c, i].flatten():
                    mean = mean + w * expected
                    var = var + w**2 * ((m**2 + v) * above + m * s * density - expected**2)
            if conv.bias is not None:
                mean = mean + conv.bias[c]
            z, spread = moments(outputs[:, c])
            blended = (1 - gain) * var + gain * spread + gain * (1 - gain) * (z - mean) ** 2
            channels.append(normalized(outputs[:, c], (1 - gain) * mean + gain * z, blended, norm, c))
        return torch.stack(channels, 1)

    stem = model.stem(x)
    state = [moments(stem[:, c]) for c in range(3)]
    features = torch.stack([normalized(stem[:, c], *state[c], model.first, c) for c in range(3)], 1).relu()
    return follow(model.conv, model.second, features, state) + follow(model.branch, model.third, features, state)


@pytest.mark.parametrize("gain", [0.1, 0.3, 1.0])
def test_chain_against_reference(gain: float) -> None:
    model = chain(gain)
    twin = copy.deepcopy(model)
    for _ in range(2):
        x = batch()
        out, wanted = model(x), slow(twin, x, gain)
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        for each, y in ((model, out), (twin, wanted)):
            each.zero_grad()
            y.sin().sum().backward()
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-7, atol=1e-8, msg=name)


def test_gain_one_is_batchnorm() -> None:
    model = chain(1.0)
    x = batch()
    features = F.batch_norm(model.stem(x), None, None, model.first.weight, model.first.bias, True).relu()
    wanted = F.batch_norm(model.conv(features), None, None, model.second.weight, model.second.bias, True)
    branch = F.batch_norm(model.branch(features), None, None, model.third.weight, model.third.bias, True)
    torch.testing.assert_close(model(x), wanted + branch, rtol=1e-9, atol=1e-9)


def test_running_statistics_are_of_the_blend() -> None:
    model = chain()
    model.second.momentum = 1.0
    x = batch()
    with torch.no_grad():
        features = model.first(model.stem(x)).relu()
        state = model.first._estimate
        assert state is not None
        observed = model.conv(features)
        wanted = correct(
            predict(state, model.conv), Estimate(*reversed(torch.var_mean(observed, (0, 2, 3), correction=0))), 0.3
        )
        model.second(observed)
    torch.testing.assert_close(model.second.running_mean, wanted.mean)
    torch.testing.assert_close(model.second.running_var, wanted.var)


def test_estimates_do_not_outlive_the_forward() -> None:
    model = chain()
    model(batch())
    assert all(norm._estimate is None for norm in (model.first, model.second, model.third))


def test_frozen_predecessor_hands_on_its_running_statistics() -> None:
    model = chain()
    model.first.eval()
    model(batch()).sum().backward()
    assert model.stem.weight.grad is not None
    assert model.first.running_mean is not None
    assert not model.first.running_mean.requires_grad


def test_norm_whose_predecessor_did_not_run_starts_anew() -> None:
    norm = KalmanNorm(4).follow_(KalmanNorm(3), nn.Conv2d(3, 4, 1))
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(norm(x), nn.BatchNorm2d(4)(x))


def test_copies_are_chained_among_themselves() -> None:
    model = chain()
    out = model.first(model.stem(batch()))  # between the two: there is an estimate with a graph
    twin = copy.deepcopy(model)
    out.sum().backward()
    assert twin.second._link is not None
    assert twin.second._link.previous is twin.first
    assert twin.second._link.producer is twin.conv
    assert list(twin.state_dict()) == list(model.state_dict())
    x = batch()
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_refused(reentrant: bool) -> None:
    model = chain()
    model.second.label = "layer1.norm"
    out = checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    with pytest.raises(
        RuntimeError, match=r"layer1\.norm: a chained KalmanNorm cannot be computed again inside backward"
    ):
        out.sum().backward()


@pytest.mark.parametrize(
    ("previous", "producer", "error", "message"),
    [
        (3, nn.Conv2d(2, 4, 1), ValueError, r"KalmanNorm: Conv2d\(2, 4, .* does not lead from 3 channels to 4"),
        (3, nn.Conv2d(3, 5, 1), ValueError, r"KalmanNorm: Conv2d\(3, 5, .* does not lead from 3 channels to 4"),
        (3, nn.ConvTranspose2d(3, 4, 2), TypeError, "KalmanNorm: cannot predict through ConvTranspose2d"),
        (3, nn.ReLU(), TypeError, r"got ReLU\(\)"),
    ],
)
def test_link_that_does_not_fit(previous: int, producer: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KalmanNorm(4).follow_(KalmanNorm(previous), producer)


def test_second_predecessor_is_refused() -> None:
    norm = KalmanNorm(4).follow_(KalmanNorm(3), nn.Conv2d(3, 4, 1))
    with pytest.raises(ValueError, match="KalmanNorm: follows KalmanNorm already"):
        norm.follow_(KalmanNorm(3), nn.Conv2d(3, 4, 1))
