"""Compensation over two layers: how far it reaches in a model, and where it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import crossbn
from crossbn.convert import cross_iteration_norms
from crossbn.lab.experiments.two_layer import TwoLayerSegment, extend_
from tests.lab.experiments.test_two_layer import batch, network


class Residual(nn.Module):
    """A block whose second norm has one before it, and an operator after it that reads a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.conv2, self.norm2 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.conv3, self.norm3 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, y: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(y)))
        x: Tensor = self.norm3(self.conv3(F.relu(self.norm2(self.conv2(hidden)) + hidden)))
        return x


def test_an_operator_that_reads_a_sum() -> None:
    model = Residual()
    crossbn.convert_(model, window=3)
    assert extend_(model) == {
        "norm1": "one layer: conv1 reads input of the model, no norm before it",
        "norm2": "two layers: conv1 before norm1, too",
        "norm3": "one layer: conv3 reads a mix of norm1, norm2",
    }
    for _ in range(3):
        model(torch.randn(2, 2, 5, 5)).sum().backward()


class Concatenating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.norm = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(4)

    def forward(self, y: Tensor) -> Tensor:
        x: Tensor = self.norm(torch.cat([self.conv1(y), self.conv2(y)], 1))
        return x


class Adding(Residual):
    def forward(self, y: Tensor) -> Tensor:
        x: Tensor = self.norm1(self.conv1(y) + y)
        return x


class Sharing(Residual):
    def forward(self, y: Tensor) -> Tensor:
        x = self.conv1(y)
        both: Tensor = self.norm1(x) + self.norm2(x)
        return both


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)
    )


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (
            parametrized,
            {},
            "3: two layers need an earlier weight that is a plain Parameter, not that of ParametrizedLinear",
        ),
        (Concatenating, {}, "norm: two layers are for a norm that reads one operator, this one reads a concatenation"),
        (Adding, {}, r"norm1: two layers are for a norm that reads one operator, this one reads conv1 \+ rest"),
        (Sharing, {}, "norm2: two layers are for norms with an operator of their own, norm1 reads it too"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            {},
            "1: two layers .* nor with a Sync",
        ),
        (parametrized, {"order": 2}, "1: two layers are compensated with order=1, got order=2"),
        (parametrized, {"order": 0}, "1: two layers are compensated with order=1, got order=0"),
        (parametrized, {"sync": True}, "1: two layers are not compensated with sync=True"),
    ],
)
def test_refused(make: Callable[[], nn.Module], options: dict[str, Any], sentence: str) -> None:
    model = make()
    crossbn.convert_(model, window=3, **options)
    feeds = {name: norm.segments for name, norm in cross_iteration_norms(model).items()}
    with pytest.raises(ValueError, match=sentence):
        extend_(model)
    assert {name: norm.segments for name, norm in cross_iteration_norms(model).items()} == feeds  # nothing has changed


def test_refused_without_norms() -> None:
    with pytest.raises(ValueError, match="extend_ needs a converted model"):
        extend_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_what_was_given_by_hand_is_not_followed_further() -> None:
    model = network("conv, relu", layers=1)
    crossbn.revert_(model)
    crossbn.convert_(model, window=3, pairs={"4": "3"})
    assert extend_(model)["4"] == "one layer: what its operator reads is not known"
    assert not any(isinstance(segment, TwoLayerSegment) for segment in cross_iteration_norms(model)["4"].segments)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_refused_in_checkpointing(use_reentrant: bool) -> None:
    case = "conv, relu"
    model = network(case)
    with pytest.raises(RuntimeError, match="4: two layers do not work inside activation checkpointing"):
        checkpoint(model, batch(case, 2).requires_grad_(), use_reentrant=use_reentrant)


# torch's compiler uses what torch itself deprecates, and looks at gradients that are not there.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_refused_under_compile(fullgraph: bool) -> None:
    case = "conv, relu"
    torch._dynamo.reset()
    compiled = torch.compile(network(case), backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match=r"two layers do not work under torch\.compile|Observed exception"):  # torch 2.8
        compiled(batch(case, 2))


class Cut(nn.Sequential):
    def forward(self, y: Tensor) -> Tensor:
        x: Tensor = self[3](self[2](self[1](self[0](y)).detach()))
        out: Tensor = self[4](x)
        return out


def test_refused_without_a_graph() -> None:
    model = Cut(*network("conv, relu").children())
    crossbn.revert_(model)
    crossbn.convert_(model, window=3)
    extend_(model)
    with pytest.raises(RuntimeError, match=r"4: two layers need a graph to the weight of Conv2d.*something detaches"):
        model(batch("conv, relu", 2))


class PartlyCheckpointed(nn.Sequential):
    def forward(self, y: Tensor) -> Tensor:
        x = checkpoint(self[0], y, use_reentrant=True)
        out: Tensor = self[4](self[3](self[2](self[1](x))))
        return out


def test_refused_where_the_operator_alone_is_checkpointed() -> None:
    case = "conv, relu"
    plain = network(case)
    plain(batch(case, 2))
    model = PartlyCheckpointed(*network(case).children())
    crossbn.load_history_state(model, crossbn.history_state(plain))  # the previous norm has a graph to the weight
    with pytest.raises(RuntimeError, match=r"4: two layers need a graph to the weight of Conv2d.*something detaches"):
        model(batch(case, 2).requires_grad_())
