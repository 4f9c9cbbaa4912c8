"""A compiled training step: one graph, no break, no recompilation, the losses of eager."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import crossbn
from crossbn.ops import cpu
from tests.support import compiled_code


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 25, 4),
    ).double()
    norms: list[Any] = [model[1], model[4]]
    for norm in norms:
        norm.running_mean.add_(0.1)  # as of a training
    crossbn.convert_(model, window=3, **options)
    return model


def train(model: nn.Module, call: Any, steps: int = 6) -> tuple[list[float], list[int]]:
    """Return the losses and how many graphs had been compiled after each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses, graphs = [], []
    for _ in range(steps):
        x = torch.randn(2, 3, 12, 12, generator=generator, dtype=torch.float64)
        target = torch.randint(4, (2,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs


# torch's compiler uses what torch itself deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"burn_in": 2}, {"positions": 16}, {"weights": "auto"}, {"prior": "running"}], ids=str
)
def test_compiled_equals_eager(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = build(**options), build(**options)
    expected, _ = train(eager, eager)
    losses, graphs = train(compiled, torch.compile(compiled, fullgraph=True))
    assert losses == pytest.approx(expected, rel=1e-9)
    assert graphs == [1] * 6  # the end of burn-in costs no recompilation either
    assert not counters["graph_break"]
    for key, tensor in crossbn.history_state(eager).items():
        torch.testing.assert_close(crossbn.history_state(compiled)[key], tensor, rtol=1e-9, atol=1e-11)


class Dense(nn.Module):
    """Norms that share a source, one of them beside channels that nothing linear feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(7, 4, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(7), nn.BatchNorm2d(11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x, self.first(x)]
        features.append(self.second(self.norm1(torch.cat(features, 1)).relu()))
        return self.norm2(torch.cat(features, 1)).mean((2, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_shared_and_pooled_sources_need_one_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Dense().double()
    report = crossbn.convert_(model, window=3, unpaired="pool")
    assert [record.reason for record in report.compensated] == ["pooled only: 3 channels input of the model"] * 2
    _, graphs = train(model, torch.compile(model, fullgraph=True, backend="eager"), steps=4)
    assert graphs == [1] * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False], ids=["in compiled code", "with torch's operators"])
def test_eager_steps_may_follow_compiled_ones(native: bool) -> None:
    """As where the last batch of an epoch, or a pass of another program, is not compiled."""
    torch._dynamo.reset()
    eager, mixed = build(), build()
    compiled, step = torch.compile(mixed), itertools.count()

    def call(x: Tensor) -> Any:
        return (compiled if 4 <= next(step) < 8 else mixed)(x)

    with compiled_code(native):
        expected, _ = train(eager, eager, steps=12)
        assert train(mixed, call, steps=12)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_native_code_does_the_backward_of_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of samples, which have as many axes as an image and which a compiler would lay out as one."""
    torch._dynamo.reset()
    model = nn.Sequential()
    for _ in range(3):
        model += nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    crossbn.convert_(model, window=3)
    compiled, done, in_c = torch.compile(model), [], cpu.step_backward

    def watched(*given: Any) -> Any:
        found = in_c(*given)
        done.append(found is not None)
        return found

    monkeypatch.setattr(cpu, "step_backward", watched)
    for _ in range(3):
        compiled(torch.randn(2, 64, 16, 16)).square().mean().backward()
    assert done == [True] * 9


class Functional(nn.Module):
    """A convolution without a module of its own, whose norm is pending until an eager step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.nn.functional.conv2d(x, self.weight))
        return out


def test_what_stays_plain_is_said() -> None:
    """Once, when it is compiled; the output is BatchNorm's, bit for bit."""
    torch.manual_seed(0)
    model, plain, x = Functional(), Functional(), torch.randn(2, 3, 6, 6)
    plain.load_state_dict(model.state_dict())
    report = crossbn.convert_(model, window=3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(
        crossbn.ConversionWarning, match="pending: plain BatchNorm in compiled steps: pairing has found no"
    ):
        first = compiled(x)
    assert torch.equal(first, plain(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), plain(x))
    assert [(record.name, record.reason[:26]) for record in report.left] == [("norm", "pairing has found no opera")]
