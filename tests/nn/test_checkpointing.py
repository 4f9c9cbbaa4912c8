"""Activation checkpointing changes nothing, and what it needs dies with the graph."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

import crossbn
from crossbn.nn import CrossIterBatchNorm
from tests.support import descend_

# A region inside another, or under no_grad, sees no gradients coming.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Forward = Callable[[nn.Sequential, Tensor, bool], Tensor]
SIZE = (7, 11)  # of the maps: unlike any other tensor's, so that activations can be told apart

KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def converted(reparametrize: Callable[[nn.Module], nn.Module] | None = None, **options: Any) -> nn.Sequential:
    """Two blocks of convolution, norm, activation, and a convolution and norm to end with."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
        nn.BatchNorm2d(3),
    ).double()
    if reparametrize is not None:
        for i in (0, 3, 6):
            reparametrize(model[i])
    crossbn.convert_(model, **{"window": 3, "positions": 24, **options})
    return model


def region(module: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=reentrant)
    return out


def in_pieces(*bounds: int) -> Forward:
    def forward(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
        for start, stop in zip((0, *bounds), (*bounds, len(model)), strict=True):
            x = region(model[start:stop], x, reentrant)
        return x

    return forward


def nested(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    outer: Any = lambda x: model[4:](region(model[2:4], region(model[:2], x, reentrant), reentrant))  # noqa: E731
    return region(outer, x, reentrant)


def partly(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    out: Tensor = model[6:](region(model[3:6], model[:3](x), reentrant))
    return out


FORWARDS: dict[str, Forward] = {
    "whole": in_pieces(),
    "blocks": in_pieces(3, 6),
    "convolutions and norms apart": in_pieces(1, 2, 4, 5, 7),
    "norms only": in_pieces(1, 4, 7),
    "nested": nested,
    "partly": partly,
}


def inputs(amount: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, *SIZE, dtype=torch.float64, generator=generator) for _ in range(amount)]


def train(
    model: nn.Sequential,
    forward: Callable[[nn.Sequential, Tensor], Tensor],
    steps: list[list[Tensor]],
    before_update: Callable[[nn.Sequential], object] = bool,
) -> Any:
    """At each step forward its batches, then one backward; return gradients, then state and history."""
    trace = []
    for step, batches in enumerate(steps):
        generator = torch.Generator().manual_seed(100 + step)
        model.zero_grad()
        batches = [batch.clone().requires_grad_() for batch in batches]
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            out = forward(model, batch)
            loss = loss + (out * torch.randn(out.shape, dtype=out.dtype, generator=generator)).sum()
        loss.backward()
        before_update(model)
        trace += [loss.detach(), *(leaf.grad for leaf in (*batches, *model.parameters()))]
        descend_(model)
    return trace, {**model.state_dict(), **crossbn.history_state(model)}


def plainly(model: nn.Sequential, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def check(forward: Forward, reentrant: bool, steps: list[list[Tensor]], **options: Any) -> None:
    expected = train(converted(**options), plainly, steps)
    got = train(converted(**options), lambda model, x: forward(model, x, reentrant), steps)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@KINDS
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("burn_in", [0, 2])
def test_equals_training_without(name: str, reentrant: bool, burn_in: int) -> None:
    check(FORWARDS[name], reentrant, [[x] for x in inputs(4)], burn_in=burn_in)


@KINDS
@pytest.mark.parametrize("options", [{"window": 1}, {"order": 2}, {"order": 0}, {"backward": "detached"}], ids=str)
def test_settings(reentrant: bool, options: dict[str, Any]) -> None:
    check(FORWARDS["blocks"], reentrant, [[x] for x in inputs(4)], **options)


@KINDS
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("burn_in", [0, 3])
def test_two_forwards_before_one_backward(name: str, reentrant: bool, burn_in: int) -> None:
    a, b, c, d, e, f = inputs(6)
    check(FORWARDS[name], reentrant, [[a, b], [c, d], [e, f]], burn_in=burn_in)


@KINDS
@pytest.mark.parametrize("name", [name for name in FORWARDS if name != "nested"])
def test_two_forwards_of_one_batch_before_one_backward(name: str, reentrant: bool) -> None:
    """Their inputs are alike, the statistics they were normalized with are not."""
    a, b = inputs(2)
    check(FORWARDS[name], reentrant, [[a], [b], [a, a, a]])


@KINDS
def test_first_of_two_forwards_goes_backward_first(reentrant: bool) -> None:
    def gradients(forward: Callable[[nn.Sequential, Tensor], Tensor]) -> list[Tensor | None]:
        model = converted()
        leaves = [x.requires_grad_() for x in inputs(4)]
        for out in [forward(model, x) for x in (*leaves, leaves[0])]:
            out.square().sum().backward()
        return [leaf.grad for leaf in (*leaves, *model.parameters())]

    got = gradients(lambda model, x: FORWARDS["blocks"](model, x, reentrant))
    torch.testing.assert_close(got, gradients(plainly), rtol=1e-10, atol=1e-10)


# Spectral normalization iterates whenever its weight is computed, with BatchNorm as well.
@KINDS
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal"])
def test_parametrized_weights(name: str, reentrant: bool, kind: str) -> None:
    reparametrize = getattr(nn.utils.parametrizations, kind)
    check(FORWARDS[name], reentrant, [[x] for x in inputs(3)], reparametrize=reparametrize)


@pytest.mark.parametrize("reentrant", [True, False, None], ids=["reentrant", "non-reentrant", "none"])
def test_parametrized_weights_read_between_steps(reentrant: bool | None) -> None:
    """By a log or a penalty: what was read then is not the weight of the next forward."""

    def forward(model: nn.Sequential, x: Tensor) -> Tensor:
        return plainly(model, x) if reentrant is None else FORWARDS["blocks"](model, x, reentrant)

    def read(model: nn.Sequential) -> list[Any]:
        return [model[i].weight for i in (0, 3, 6)]

    steps = [[x] for x in inputs(4)]
    expected = train(converted(nn.utils.parametrizations.weight_norm), plainly, steps)
    got = train(converted(nn.utils.parametrizations.weight_norm), forward, steps, before_update=read)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


class DenseLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, *maps: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(torch.cat(maps, 1)).relu())
        return out


@KINDS
def test_dense_network(reentrant: bool) -> None:
    """Memory-saving DenseNets put concatenation, norm and convolution into one region."""

    class Dense(nn.Sequential):
        def forward(self, x: Tensor, wrap: Callable[..., Tensor] = lambda layer, *maps: layer(*maps)) -> Tensor:
            first, *layers = self
            maps = [first(x)]
            for layer in layers:
                maps.append(wrap(layer, *maps))
            return torch.cat(maps, 1)

    def model() -> Dense:
        torch.manual_seed(0)
        dense = Dense(nn.Conv2d(2, 2, 1), *(DenseLayer(2 * (i + 1)) for i in range(3))).double()
        report = crossbn.convert_(dense, window=3, pairs=None, example_inputs=(inputs(1)[0],))
        assert [len(record.producers) for record in report.compensated] == [1, 2, 3]
        return dense

    steps = [[x] for x in inputs(4)]
    wrap = lambda layer, *maps: checkpoint(layer, *maps, use_reentrant=reentrant)  # noqa: E731
    expected = train(model(), plainly, steps)
    got = train(model(), lambda model, x: model(x, wrap), steps)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@KINDS
@pytest.mark.parametrize("name", FORWARDS)
def test_no_gradients_no_trace(name: str, reentrant: bool) -> None:
    model = converted()
    a, b = (x.requires_grad_() for x in inputs(2))
    FORWARDS[name](model, a, reentrant).sum().backward()
    before = crossbn.history_state(model)
    with torch.no_grad():
        look = FORWARDS[name](model, b, reentrant)
        assert torch.equal(look, model(b))
    torch.testing.assert_close(crossbn.history_state(model), before, rtol=0, atol=0)


@KINDS
def test_update_bn_is_that_of_batchnorm(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            return region(self.body, x, reentrant)

    model = converted()
    plain = copy.deepcopy(model)
    crossbn.revert_(plain)
    update_bn(inputs(4), Checkpointed(model))
    update_bn(inputs(4), plain)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def cache_sizes(model: nn.Module) -> list[int]:
    gc.collect()
    return [len(norm._recompute_cache._records) for norm in model.modules() if isinstance(norm, CrossIterBatchNorm)]


@KINDS
@pytest.mark.parametrize("burn_in", [0, 9])
def test_records_live_as_long_as_the_graph(reentrant: bool, burn_in: int) -> None:
    model = converted(burn_in=burn_in)
    a, b = (x.requires_grad_() for x in inputs(2))
    first = FORWARDS["blocks"](model, a, reentrant)
    second = FORWARDS["blocks"](model, b, reentrant)
    assert cache_sizes(model) == [2, 2, 2]
    second.sum().backward()
    del second
    assert cache_sizes(model) == [1, 1, 1]
    del first  # without backward
    assert cache_sizes(model) == [0, 0, 0]


def test_without_checkpointing_nothing_is_recorded() -> None:
    model = converted()
    out = model(inputs(1)[0])
    assert cache_sizes(model) == [0, 0, 0]
    assert out.requires_grad


def maps_alive() -> int:
    return sum(type(thing) is Tensor and thing.shape[2:] == SIZE for thing in gc.get_objects())


def check_nothing_outlives_backward(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    before = maps_alive()
    for x in inputs(2):
        forward(x.requires_grad_()).square().sum().backward()
    del x
    if maps_alive() != before:
        gc.collect()  # slow, and only torch's own cycles need it
    assert maps_alive() == before
    assert model.training


@KINDS
@pytest.mark.parametrize("name", FORWARDS)
def test_no_activation_outlives_backward(name: str, reentrant: bool) -> None:
    model = converted()
    check_nothing_outlives_backward(model, lambda x: FORWARDS[name](model, x, reentrant))


@KINDS
@pytest.mark.parametrize("name", ["blocks", "norms only"])
def test_no_activation_outlives_backward_with_weight_norm(name: str, reentrant: bool) -> None:
    model = converted(nn.utils.parametrizations.weight_norm)
    check_nothing_outlives_backward(model, lambda x: FORWARDS[name](model, x, reentrant))


@pytest.mark.parametrize("reparametrize", [None, nn.utils.parametrizations.weight_norm], ids=["plain", "weight norm"])
def test_no_activation_outlives_backward_without_checkpointing(reparametrize: Any) -> None:
    model = converted(reparametrize)
    check_nothing_outlives_backward(model, model)


def test_no_activation_outlives_backward_beside_a_frozen_norm() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.left, self.right = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(x)
            product: Tensor = self.left(out) * self.right(out)
            return product

    model = Fork().double()
    crossbn.convert_(model, window=3)
    model.right.eval()
    check_nothing_outlives_backward(model, model)
