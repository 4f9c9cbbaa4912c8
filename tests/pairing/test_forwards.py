"""Models that cannot be traced, and the state that looking at them leaves alone."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from crossbn.pairing import Pairing, Segment, find_pairs
from tests.pairing.networks import DataDependentNet, Net, PreActivationBlock, Untraceable

NOT_REACHED = "not reached by tracing"


def reasons(pairs: dict[str, Pairing]) -> dict[str, str]:
    return {name: pairing.segments[0].reason for name, pairing in pairs.items()}


def test_without_an_example_the_traceable_parts_are_found() -> None:
    pairs = find_pairs(DataDependentNet())
    assert reasons(pairs) == {"trunk.1": "trunk.0", "norm": NOT_REACHED, "unused": NOT_REACHED}
    assert pairs["norm"].segments == (Segment(6, (), complete=False, reason=NOT_REACHED),)
    assert [pairing.segments[0].final for pairing in pairs.values()] == [True, False, False]


@pytest.mark.parametrize(("level", "branch"), [(1.0, "bright"), (-1.0, "dark")])
def test_an_example_shows_the_branch_taken(level: float, branch: str) -> None:
    pairs = find_pairs(DataDependentNet(), (torch.full((1, 3, 2, 2), level),))
    assert reasons(pairs) == {"trunk.1": "trunk.0", "norm": branch, "unused": NOT_REACHED}
    assert pairs["norm"].exclusive


def test_inputs_of_parts_become_known() -> None:
    model = Untraceable(nn.Sequential(nn.Conv2d(3, 4, 1), Untraceable(PreActivationBlock(4, 8))))
    alone = find_pairs(model)["model.1.model.norm1"]
    seen = find_pairs(model, (torch.rand(1, 3, 4, 4),))["model.1.model.norm1"]
    assert alone.segments == (Segment(4, (), complete=False, reason="input of model.1.model"),)
    assert seen.segments == (Segment(4, ("model.0",), complete=True, reason="model.0"),)


def test_shared_part_called_twice_is_seen_to_differ() -> None:
    shared = nn.BatchNorm2d(4)
    net = Untraceable(Net(lambda net, x: net.norm(net.conv(x)) + net.again(net.other(x)), norm=shared, again=shared))
    pairs = find_pairs(net, (torch.rand(1, 3, 2, 2),))
    assert reasons(pairs) == {"model.norm": "called 2 times in a forward"}


def test_a_whole_trace_is_completed_by_an_example_not_replaced() -> None:
    class OptionalHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x: Tensor, with_head: bool = False) -> Any:
            out = self.norm(self.conv(x) if self.training else self.conv(x).relu())
            return self.head(out) if with_head else out

    model = OptionalHead().eval()
    assert reasons(find_pairs(model)) == {"norm": "conv", "head": NOT_REACHED}
    pairs = find_pairs(model, (torch.rand(1, 3, 2, 2), True))
    assert reasons(pairs) == {"norm": "conv", "head": "after native_batch_norm"}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False), nn.SyncBatchNorm(4)])
def test_one_value_per_channel_will_do(norm: nn.Module) -> None:
    model = Untraceable(nn.Sequential(nn.Conv2d(3, 4, 1), norm)).train()
    assert reasons(find_pairs(model, (torch.rand(1, 3, 1, 1),))) == {"model.1": "model.0"}
    assert norm.training


class Stateful(nn.Module):
    """Moves every kind of state there is, in a forward that cannot be traced or in one that can."""

    count: Tensor
    shared: Tensor

    def __init__(self, traceable: bool) -> None:
        super().__init__()
        self.traceable = traceable
        self.conv = parametrizations.spectral_norm(nn.Conv2d(3, 4, 1))
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("shared", self.count)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        self.shared = self.shared + 1
        self.calls += 1
        self.cache = x
        noise = torch.rand(1) + random.random() + numpy.random.rand()  # noqa: NPY002  # models use global state
        warnings.warn("noise", stacklevel=2)
        if not self.traceable and x.isnan().any():
            raise ValueError("NaN")
        return self.norm(self.conv(x)) + noise


def random_states() -> list[object]:
    numpy_state: Any = numpy.random.get_state()  # noqa: NPY002  # the state to be left alone
    return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]]


@pytest.mark.parametrize("traceable", [True, False])
def test_the_model_is_left_as_it_was(traceable: bool) -> None:
    model = Stateful(traceable)
    model.norm.eval()
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    named_tensors: list[tuple[str, Tensor]] = [*model.named_buffers(), *model.named_parameters()]
    tensors = {name: (tensor, tensor.clone()) for name, tensor in named_tensors}
    example = torch.rand(2, 3, 4, 4)
    before = random_states()

    pairs = find_pairs(model, (example,))

    assert pairs["norm"] == Pairing("norm", (Segment(4, ("conv",), complete=True, reason="conv"),), exclusive=True)
    assert random_states() == before
    for name, module in model.named_modules():
        assert list(vars(module)) == list(attributes[name])
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        original, value = tensors[name]
        assert tensor is original
        assert torch.equal(tensor, value)


def test_an_error_in_the_example_forward_is_the_callers_to_see() -> None:
    model = Stateful(traceable=False)
    with pytest.raises(ValueError, match="NaN"):
        find_pairs(model, (torch.full((1, 3, 2, 2), torch.nan),))
    assert model.calls == 0
    assert model.count.tolist() == [0, 0]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
