"""Weight Normalization and Weight Standardization."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import crossbn
from crossbn.nn import reparametrize_


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 2, stride=2),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(3 * 64, 5),
    )


def batch() -> Tensor:
    return torch.randn(2, 2, 6, 6)


CONVOLUTIONS: list[Callable[[], nn.Module]] = [
    lambda: nn.Conv1d(4, 6, 3),
    lambda: nn.Conv2d(4, 6, 3, groups=2),
    lambda: nn.Conv3d(2, 3, (1, 2, 3)),
    lambda: nn.Conv2d(4, 4, 3, groups=4),
    lambda: nn.ConvTranspose2d(4, 6, 3),
    lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
]


def columns(module: nn.Module, weight: Tensor) -> list[Tensor]:
    """What each output channel reads with, in the order of the channels."""
    if not isinstance(module, nn.ConvTranspose2d):
        return list(weight)
    parts = weight.chunk(module.groups)
    return [part[:, c] for part in parts for c in range(part.shape[1])]


@pytest.mark.parametrize("make", CONVOLUTIONS)
def test_weight_standardization(make: Callable[[], nn.Module]) -> None:
    module = make().double()
    original = module.get_parameter("weight")
    assert reparametrize_(nn.Sequential(module), "ws") == ["0"]
    assert isinstance(module.weight, Tensor)
    for column, raw in zip(columns(module, module.weight), columns(module, original), strict=True):
        expected = (raw - raw.mean()) / torch.sqrt(raw.var(correction=0) + 1e-5)
        torch.testing.assert_close(column, expected, rtol=1e-10, atol=1e-10)


def test_gradient_of_weight_standardization() -> None:
    module = nn.Conv2d(2, 3, 2).double()
    reparametrize_(module, "ws")
    step = module.get_submodule("parametrizations.weight.0")
    weight = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(step, weight)


@pytest.mark.parametrize(("name", "expected"), [("wn", ["0", "3", "6"]), ("ws", ["0", "3"])])
def test_which_layers(name: str, expected: list[str]) -> None:
    model = network()
    assert reparametrize_(model, name) == expected
    assert reparametrize_(model, name) == []
    assert [key for key, module in model.named_modules() if parametrize.is_parametrized(module)] == expected


def test_single_weights_are_not_standardized() -> None:
    assert reparametrize_(nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(1, 4, 1)), "ws") == []


def test_weight_normalization_begins_with_the_function_that_was_there() -> None:
    model = network().eval()
    x = batch()
    before = model(x)
    reparametrize_(model, "wn")
    torch.testing.assert_close(model(x), before)


def test_weight_normalization_has_a_length_for_each_output() -> None:
    model = network()
    reparametrize_(model, "wn")
    for index in (0, 3, 6):
        scale = model[index].get_parameter("parametrizations.weight.original0")
        assert scale.numel() == {0: 4, 3: 3, 6: 5}[index]
        with torch.no_grad():
            scale.fill_(2)
        weight = model[index].weight
        assert isinstance(weight, Tensor)
        norms = torch.stack([column.norm() for column in columns(model[index], weight)])
        torch.testing.assert_close(norms, torch.full_like(norms, 2))


def test_standardized_weight_stays_the_same_parameter() -> None:
    model = network()
    weight = model.get_parameter("0.weight")
    optimizer = torch.optim.SGD([weight], 0.1)
    reparametrize_(model, "ws")
    before = weight.detach().clone()
    model(batch()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    assert model.get_parameter("0.parametrizations.weight.original") is weight


@pytest.mark.parametrize("name", ["wn", "ws"])
def test_copies_and_checkpoints(name: str) -> None:
    model, fresh = network(), network()
    for each in (model, fresh):
        reparametrize_(each, name)
    fresh.load_state_dict(model.state_dict(), strict=True)
    x = batch()
    twin = copy.deepcopy(model)
    out = model(x)
    assert torch.equal(fresh(x), out)
    assert torch.equal(twin(x), out)


@pytest.mark.parametrize("name", ["wn", "ws"])
def test_with_cross_iteration_norms(name: str) -> None:
    """Pairing sees through a reparametrization."""
    model = network()
    reparametrize_(model, name)
    report = crossbn.convert_(model, window=3)
    assert [record.name for record in report.compensated] == ["1"]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(batch()).square().sum()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (network, "weight_norm", "no reparametrization is called 'weight_norm'; there are wn, ws"),
        (
            lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2)),
            "wn",
            "0: the output channels of ConvTranspose2d.* are no axis",
        ),
        (
            lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(2, 2, 2))),
            "ws",
            "0: the weight of .*Conv2d is parametrized otherwise already",
        ),
    ],
)
def test_wrong(make: Callable[[], nn.Module], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reparametrize_(make(), name)
