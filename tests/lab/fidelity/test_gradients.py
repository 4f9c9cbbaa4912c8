import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from crossbn.lab.fidelity.gradients import LayerGradients, average_ratios, gradient_norms, sample_jacobian_norms


def layer(inputs: int, outputs: int, kernel_size: int = 3) -> list[nn.Module]:
    # Without running statistics: torch.func cannot change them.
    norm = nn.BatchNorm2d(outputs, track_running_stats=False)
    return [nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2), norm, nn.ReLU()]


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(*layer(2, 4), *layer(4, 3), *layer(3, 5)).double()


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(3, 2, 5, 5, dtype=torch.float64) + 0.5


def full_jacobians(model: nn.Module, batch: Tensor, norm: str, weight: str) -> tuple[Tensor, Tensor]:
    """d mean / dW and d nu / dW, all entries."""

    def moments(value: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        handle = model.get_submodule(norm).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        functional_call(model, {weight: value}, (batch,))
        handle.remove()
        return seen[0].mean((0, 2, 3)), (seen[0] ** 2).mean((0, 2, 3))

    return jacrev(moments)(model.get_parameter(weight).detach())


def test_one_projection_is_exact_for_a_layer_s_own_weights(model: nn.Sequential, batch: Tensor) -> None:
    found = gradient_norms(model, batch, probes=1)
    assert [each.norm for each in found] == ["1", "4", "7"]
    for each in found:
        mean, second_moment = full_jacobians(model, batch, each.norm, f"{each.operators[0]}.weight")
        assert each.mean[0] == pytest.approx(mean.square().sum().item(), rel=1e-12)
        assert each.second_moment[0] == pytest.approx(second_moment.square().sum().item(), rel=1e-12)


def test_expectation_is_the_norm_of_the_full_jacobian(model: nn.Sequential, batch: Tensor) -> None:
    probes = 300
    last = gradient_norms(model, batch, probes=probes)[-1]
    assert last.operators == ("6", "3", "0")
    samples = _samples(model, batch, probes)
    for place, operator in enumerate(last.operators):
        jacobians = full_jacobians(model, batch, "7", f"{operator}.weight")
        for estimate, jacobian, sampled in zip(
            (last.mean[place], last.second_moment[place]), jacobians, samples, strict=True
        ):
            truth = jacobian.square().sum().item()
            standard_error = sampled[:, place].std().item() / probes**0.5
            assert standard_error < 0.1 * truth
            assert abs(estimate - truth) < 4 * standard_error + 1e-9 * truth


def _samples(model: nn.Sequential, batch: Tensor, probes: int) -> tuple[Tensor, Tensor]:
    x = model[:7](batch)
    weights = [model.get_parameter(f"{name}.weight") for name in ("6", "3", "0")]
    generator = torch.Generator().manual_seed(1)
    moments = x.mean((0, 2, 3)), x.square().mean((0, 2, 3))
    first, second = (sample_jacobian_norms(moment, weights, probes, generator) for moment in moments)
    return first, second


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.long, self.longer, self.short, self.last = (nn.Conv2d(2, 2, 1) for _ in range(5))
        self.norms = nn.ModuleDict({name: nn.BatchNorm2d(2) for name in ("stem", "long", "longer", "short", "last")})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norms["stem"](self.stem(x)))
        y = self.norms["longer"](self.longer(torch.relu(self.norms["long"](self.long(x)))))
        y = torch.relu_(y + self.norms["short"](self.short(x)))  # the shortcut comes later, as in torchvision
        return self.norms["last"](self.last(y))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(*layer(2, 2), *layer(2, 2))
        self.flat = nn.Sequential(*layer(2, 3))
        self.last = nn.Sequential(*layer(5, 2))
        self.unfed = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.unfed(self.last(torch.cat([self.deep(x), self.flat(x)], 1)))


@pytest.mark.parametrize(
    ("network", "ways"),
    [
        (
            Residual,
            {
                ("stem",),
                ("long", "stem"),
                ("longer", "long", "stem"),
                ("short", "stem"),
                ("last", "longer", "long"),
            },
        ),
        (Branches, {("deep.0",), ("deep.3", "deep.0"), ("flat.0",), ("last.0", "deep.3", "deep.0")}),
    ],
)
def test_the_way_back_is_the_longest(network: type[nn.Module], ways: set[tuple[str, ...]]) -> None:
    found = gradient_norms(network(), torch.randn(4, 2, 3, 3), probes=1)
    assert {each.operators for each in found} == ways


def test_model_and_random_numbers_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout()).eval()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    gradient_norms(model, torch.ones(2, 2, 2, 2), probes=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[1].training
    assert model[0].weight.grad is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_ratios_are_averaged_over_the_layers_that_have_them() -> None:
    layers = [
        LayerGradients("1", ("0",), (1.0,), (1.0,)),
        LayerGradients("3", ("2", "0"), (1.0, 0.25), (4.0, 1.0)),
        LayerGradients("5", ("4", "2", "0"), (1.0, 0.01, 0.04), (1.0, 0.09, 0.16)),
    ]
    mean, second_moment = average_ratios(layers)
    assert mean == pytest.approx(((0.5 + 0.1) / 2, 0.2))
    assert second_moment == pytest.approx(((0.5 + 0.3) / 2, 0.4))
