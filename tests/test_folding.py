"""Folding: equal to evaluation mode, and the original is left as it was."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import crossbn
from tests.support import Standardized


def trained(model: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model.double()
    crossbn.convert_(model, window=3)
    for _ in range(4):
        model(torch.randn(2, *shape, dtype=torch.float64))
    return model.eval(), torch.randn(3, *shape, dtype=torch.float64)


OPERATORS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), (4,)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6)), (4, 7)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)), (4, 5, 5)),
    "without affine": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), (4, 5, 5)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d(6)), (4, 5, 5)),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4, 6, 3)), nn.BatchNorm2d(6)),
        (4, 5, 5),
    ),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(4, 6, 3)), nn.BatchNorm2d(6)),
        (4, 5, 5),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_folded_equals_evaluation(name: str) -> None:
    build, shape = OPERATORS[name]
    model, x = trained(build(), shape)
    expected = model(x)
    folded = crossbn.fold(model)
    assert [type(module) for module in folded][1] is nn.Identity  # type: ignore[attr-defined]
    torch.testing.assert_close(folded(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_norm_whose_operator_feeds_something_else_stays() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y + self.norm(y)

    model, x = trained(Branching(), (2, 4, 4))
    folded = crossbn.fold(model)
    assert type(folded.norm) is nn.BatchNorm2d
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


class Padding(nn.Conv2d):
    """Pads unevenly, as no convolution of torch's does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 0, 2, 0)), self.weight, self.bias, self.stride)


class WithoutBias(nn.Conv2d):
    """Forgets its bias, which the norm's shift would become."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


class Rectified(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (Padding, nn.Identity),
        (Standardized, nn.BatchNorm2d),
        (WithoutBias, nn.BatchNorm2d),
        (Rectified, nn.BatchNorm2d),
    ],
)
def test_an_operator_with_a_forward_of_its_own(operator: type[nn.Conv2d], kind: type[nn.Module]) -> None:
    """It is folded into if the graph has shown that it is linear, and the result does the same."""
    model, x = trained(nn.Sequential(operator(2, 3, 3), nn.BatchNorm2d(3)), (2, 6, 6))
    expected = model(x)
    folded = crossbn.fold(model)
    assert [type(module) for module in folded.children()] == [operator, kind]
    torch.testing.assert_close(folded(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_an_operator_with_a_forward_of_its_own_that_has_not_run() -> None:
    model = nn.Sequential(Padding(2, 3, 3), nn.BatchNorm2d(3)).double()
    crossbn.convert_(model, window=3)
    model.eval()
    folded, x = crossbn.fold(model), torch.randn(2, 2, 6, 6, dtype=torch.float64)
    assert type(folded.get_submodule("1")) is nn.BatchNorm2d
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


def test_an_operator_with_a_forward_of_its_own_that_feeds_something_else() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = Padding(2, 3, 3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y + self.norm(y)

    model, x = trained(Branching(), (2, 6, 6))
    folded = crossbn.fold(model)
    assert type(folded.norm) is nn.BatchNorm2d
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)


def test_timm_activation_survives() -> None:
    crossbn.compat.ensure_torchvision()
    from timm.layers.norm_act import BatchNormAct2d

    model, x = trained(nn.Sequential(nn.Conv2d(2, 3, 1), BatchNormAct2d(3)), (2, 4, 4))
    expected = model(x)
    assert (expected >= 0).all()
    torch.testing.assert_close(crossbn.fold(model)(x), expected, rtol=1e-12, atol=1e-12)
    crossbn.revert_(model)
    assert type(model[1]) is BatchNormAct2d  # type: ignore[index]
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


class DataDependent(nn.Module):
    """Looks at the data, so that it cannot be traced, and at what its convolution makes, if it is told to."""

    def __init__(self, read: Callable[[Tensor], Tensor | float] = lambda _: 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.read = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x if x.isfinite().all() else torch.zeros_like(x))
        out: Tensor = self.norm(y) + self.read(y)
        return out


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda y: y.shape[1], nn.Identity),
        (Tensor.relu, nn.BatchNorm2d),
        (lambda y: y.detach().mean(), nn.BatchNorm2d),
        (lambda y: 1.0 if y.max() > 0 else 2.0, nn.BatchNorm2d),
    ],
)
def test_an_example_shows_what_a_trace_does_not(
    read: Callable[[Tensor], Tensor | float], kind: type[nn.Module]
) -> None:
    model, x = trained(DataDependent(read), (2, 4, 4))
    expected = model(x)
    assert type(crossbn.fold(model).norm) is nn.BatchNorm2d
    folded = crossbn.fold(model, (x,))
    assert type(folded.norm) is kind
    torch.testing.assert_close(folded(x), expected, rtol=1e-10, atol=1e-10)
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
