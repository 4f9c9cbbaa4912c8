"""Running statistics as a belief: prior="running"."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crossbn
from tests.support import compiled_code, draw

F64 = torch.float64


def trained(convolution: nn.Module | None = None) -> nn.Sequential:
    """Return a converted network whose running statistics are not its batches'."""
    torch.manual_seed(0)
    model = nn.Sequential(convolution or nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).double()
    norm: Any = model[1]
    norm.running_mean.copy_(torch.randn(4))
    norm.running_var.copy_(1 + torch.rand(4))
    crossbn.convert_(model, window=4, prior="running")
    return model


def batch(seed: int) -> Tensor:
    return draw(seed, 2, 3, 7, 7, dtype=F64) + 0.5


@pytest.mark.parametrize("compiled", [True, False])
def test_without_a_change_of_weights_it_is_a_frozen_norm(compiled: bool) -> None:
    model = trained()
    frozen = copy.deepcopy(model)
    crossbn.revert_(frozen)
    frozen.eval()
    before = copy.deepcopy(model[1].state_dict())
    with compiled_code(compiled):
        for seed in range(6):
            x, y = (batch(seed).requires_grad_() for _ in range(2))
            got, expected = model(x), frozen(y)
            torch.testing.assert_close(got, expected)
            weights = torch.randn(got.shape, dtype=F64)
            got.backward(weights)
            expected.backward(weights)
            torch.testing.assert_close(x.grad, y.grad)
    for name, value in model[1].state_dict().items():
        if name != "num_batches_tracked":
            torch.testing.assert_close(value, before[name])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "convolution",
    [nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(3, 4, 7, bias=False), nn.Conv2d(3, 4, 3, stride=2, bias=False)],
)
def test_the_belief_keeps_its_scale_whatever_the_weights_scale_becomes(convolution: nn.Module, compiled: bool) -> None:
    model = trained(copy.deepcopy(convolution))
    norm: Any = model[1]
    norm.momentum = 0.0  # it moves with the weights and not to anything else
    before = copy.deepcopy(model[1].state_dict())
    grown = 1.0
    with compiled_code(compiled):
        for seed in range(20):
            model(batch(seed))
            with torch.no_grad():
                model[0].weight.mul_(1.01)  # type: ignore[operator]
            grown *= 1.01
        model(batch(20))
    torch.testing.assert_close(norm.running_var, before["running_var"] * grown**2, rtol=0.01, atol=0)
    # The mean moves by what the convolution's mean does, which is not the belief's own.
    moved = norm.running_mean - before["running_mean"]
    with torch.no_grad():
        x = torch.cat([batch(seed) for seed in range(21)])
        torch.testing.assert_close(moved, model[0](x).mean((0, 2, 3)) * (1 - 1 / grown), rtol=0.2, atol=0.05)


def test_gradients_have_no_part_along_the_scale_of_the_weights() -> None:
    model = trained()
    norm: Any = model[1]
    with torch.no_grad():  # other images are as bright, but more alike
        x = model[0](torch.cat([batch(seed) for seed in range(4)]))
        norm.running_mean.copy_(x.mean((0, 2, 3)))
        norm.running_var.copy_(3 * x.var((0, 2, 3)))
    for seed in range(12):
        model(batch(seed % 4))
    # The same four batches are in the window: what a step's own batch lacks is small on the average.
    along = along_frozen = 0.0
    for seed in range(4):
        x = batch(seed)
        target = draw(100 + seed, 2, 4, 5, 5, dtype=F64)
        weight: Any = model[0].weight
        (found,) = torch.autograd.grad(F.mse_loss(model(x), target), weight)
        frozen = F.batch_norm(
            F.conv2d(x, weight), norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
        (other,) = torch.autograd.grad(F.mse_loss(frozen, target), weight)
        along += float((found * weight.detach()).sum())
        along_frozen += float((other * weight.detach()).sum())
    assert abs(along) < 0.25 * abs(along_frozen)


def run(model: nn.Module, steps: int, compiled: bool = True) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with compiled_code(compiled):
        for seed in range(steps):
            optimizer.zero_grad()
            out = model(batch(seed))
            F.mse_loss(out, torch.linspace(0, 1, 5, dtype=F64).expand_as(out)).backward()
            optimizer.step()
    return out.detach()


def test_compiled_steps_are_those_of_the_reference() -> None:
    fast, slow = trained(), trained()
    torch.testing.assert_close(run(fast, 8), run(slow, 8, compiled=False))
    for one, other in zip(fast.state_dict().values(), slow.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(fast[1].belief.drift, slow[1].belief.drift)  # type: ignore[union-attr]


def test_it_fades_as_the_network_leaves_the_checkpoint() -> None:
    model = trained()
    run(model, 8)
    norm: Any = model[1]
    x = batch(50)
    with torch.no_grad():
        frozen = F.batch_norm(
            model[0](x), norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
        norm.belief.drift.zero_()
        near = (model(x) - frozen).abs().mean()
        norm.belief.drift.fill_(100.0)
        far = model(x)
    assert float(near) < 0.1 * float((far - frozen).abs().mean())
    torch.testing.assert_close(far.mean((0, 2, 3)), norm.bias, atol=0.5, rtol=0)  # as a norm over the window


def test_a_forward_without_gradients_leaves_no_trace() -> None:
    model = trained()
    run(model, 5)
    before = copy.deepcopy((model.state_dict(), model[1].belief.drift))  # type: ignore[union-attr]
    with torch.no_grad():
        model(batch(70))
    for one, other in zip(model.state_dict().values(), before[0].values(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(model[1].belief.drift, before[1])  # type: ignore[union-attr, arg-type]


def test_a_training_goes_on_where_it_was() -> None:
    first, second = trained(), trained()
    run(first, 5)
    second.load_state_dict(first.state_dict())
    crossbn.load_history_state(second, crossbn.history_state(first))
    assert torch.equal(run(first, 9), run(second, 9))
    other = trained()
    crossbn.convert_(other, window=4)
    with pytest.raises(ValueError, match="this norm has none"):
        crossbn.load_history_state(other, crossbn.history_state(first))
    state = {name: value for name, value in crossbn.history_state(first).items() if name != "1/drift"}
    with pytest.raises(ValueError, match="these have prior='running'"):
        crossbn.load_history_state(first, state)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_step_is_the_same(reentrant: bool) -> None:
    plain, wrapped = trained(), trained()
    run(plain, 4)
    run(wrapped, 4)
    x = batch(9).requires_grad_()
    plain(x).square().mean().backward()
    checkpoint(wrapped, x, use_reentrant=reentrant).square().mean().backward()
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffer, wrapped.get_buffer(name))


def grown(model: nn.Sequential, step: Callable[[int], Any]) -> float:
    """Return how much the believed variance has grown after 20 steps of weights that grow by 1 %."""
    norm: Any = model[1]
    before, norm.momentum = norm.running_var.clone(), 0.0
    for seed in range(20):
        step(seed)
        with torch.no_grad():
            model[0].weight.mul_(1.01)  # type: ignore[operator]
    step(20)
    return float((norm.running_var / before).mean())


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_that_are_not_remembered_are_made_up_for_once(compiled: bool) -> None:
    model = trained(nn.Conv2d(3, 4, 1, stride=2, bias=False))

    def step(seed: int) -> None:
        x = batch(seed)
        if 5 < seed < 20:
            x[:, :, 1, 1] = float("inf")  # at a place that the stride skips
        model(x)

    with compiled_code(compiled):
        assert grown(model, step) == pytest.approx(1.01**40, rel=0.05)  # one step of 15 %, to the first order


def test_of_several_streams_one_moves_the_belief() -> None:
    model = trained()

    def step(seed: int) -> None:
        model(batch(seed))
        with crossbn.stream("generated"):
            model(batch(100 + seed))

    assert grown(model, step) == pytest.approx(1.01**40, rel=0.02)


def test_every_call_of_a_forward_is_learnt_from() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.norm(self.conv(a)) + self.norm(self.conv(b))
            return out

    found = []
    for first in (1.0, -5.0):
        torch.manual_seed(0)
        model = Twice().double()
        norm: Any = model.norm
        norm.running_mean.copy_(torch.randn(4))
        crossbn.convert_(model, window=4, prior="running")
        for seed in range(20):
            model(first * batch(seed), batch(100 + seed))
            with torch.no_grad():
                model.conv.weight.add_(0.02 * torch.randn(model.conv.weight.shape, dtype=F64))
        found.append(norm.running_mean)
        assert float(norm.belief.drift) > 1e-3  # of the call that leads; the other has none to add
    assert float((found[0] - found[1]).abs().min()) > 0.1


def test_channels_without_an_operator_fade_with_the_others() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(7)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(torch.cat([self.conv(x), x.relu()], 1))
            return out

    torch.manual_seed(0)
    model = Beside().double()
    norm: Any = model.norm
    norm.running_mean.copy_(torch.randn(7))
    before = norm.running_mean.clone()
    crossbn.convert_(model, window=4, prior="running")
    for seed in range(40):
        model(batch(seed))
        with torch.no_grad():
            model.conv.weight.add_(0.05 * torch.randn(model.conv.weight.shape, dtype=F64))
    assert float((norm.running_mean - before).abs().min()) > 0.05


def test_a_norm_that_began_without_a_belief_stays_without() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        head = [nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)]
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), *head).double()
        norm: Any = model[1]
        norm.running_mean.copy_(torch.randn(4))
        with pytest.warns(crossbn.ConversionWarning, match="1 of 2 norms, 4 among them, are new"):
            crossbn.convert_(model, window=4, prior="running")
        return model

    first, second = make(), make()
    for seed in range(6):
        first(batch(seed))
    second.load_state_dict(first.state_dict())
    crossbn.load_history_state(second, crossbn.history_state(first))
    assert torch.equal(first(batch(9)), second(batch(9)))
    crossbn.set_window_(first, 6)
    crossbn.reset_history_(first)
    believes: list[Any] = [first[1], first[4]]
    assert [norm.belief is not None for norm in believes] == [True, False]


def test_a_look_in_inference_mode_does_no_harm() -> None:
    model = trained().float()
    with torch.inference_mode():
        model(batch(0).float())
    model(batch(1).float())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weights": "equal"}, "needs compensation"),
        ({"order": 0}, "needs compensation"),
        ({"decay": 0.5}, "needs compensation"),
        ({"window": 1}, "needs a window above 1, and no burn-in"),
        ({"burn_in": 3}, "needs a window above 1, and no burn-in"),
    ],
)
def test_it_needs_what_it_is_made_of(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f'prior="running" {said}'):
        crossbn.nn.CrossIterBatchNorm2d(4, prior="running", **wrong)


def test_without_running_statistics_there_is_nothing_to_believe() -> None:
    assert crossbn.nn.CrossIterBatchNorm2d(4, prior="running", track_running_stats=False).belief is None


def test_a_new_norm_believes_nothing_and_one_that_is_loaded_does() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).double()
    with pytest.warns(crossbn.ConversionWarning, match=r'prior="running": 1 of 1 norms, 1 among them, are new'):
        crossbn.convert_(model, window=4, prior="running")
    assert model[1].belief is None
    plain = copy.deepcopy(model)
    crossbn.convert_(plain, window=4)
    assert torch.equal(model(batch(0)), plain(batch(0)))
    model.load_state_dict(trained().state_dict())
    assert model[1].belief is not None
    crossbn.convert_(model, window=4)
    assert model[1].belief is None


def test_several_segments_and_a_bias_are_believed_in_too() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 2, 3), nn.Conv2d(3, 3, 3, bias=False)
            self.norm = nn.BatchNorm2d(5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(torch.cat([self.a(x), self.b(x)], 1))
            return out

    torch.manual_seed(0)
    model = Joined().double()
    norm: Any = model.norm
    norm.running_mean.copy_(torch.randn(5))
    frozen = copy.deepcopy(model).eval()
    crossbn.convert_(model, window=3, prior="running")
    for seed in range(4):
        torch.testing.assert_close(model(batch(seed)), frozen(batch(seed)))
    run(model, 4)
    assert float(norm.belief.drift) > 0


def test_norms_that_share_a_convolution_have_beliefs_of_their_own() -> None:
    class Shared(nn.Module):
        def __init__(self, joined: bool) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3, 40, 30, bias=False) for _ in range(1 if joined else 2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(40) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = [conv(x) for conv in self.convs]
            return self.norms[0](y[0]) - self.norms[1](y[-1])

    torch.manual_seed(0)
    one, two = Shared(True).double(), Shared(False).double()
    for i, norm in enumerate(one.norms):
        norm.running_mean.fill_(i)  # type: ignore[operator]
    two.norms.load_state_dict(one.norms.state_dict())
    for conv in two.convs:
        conv.load_state_dict(one.convs[0].state_dict())
    for model in (one, two):
        crossbn.convert_(model, window=4, prior="running")
    for seed in range(5):
        x = draw(seed, 2, 3, 33, 33, dtype=F64)
        losses = [(model(x) - x[:, :1, :4, :4]).square().mean() for model in (one, two)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        pair = [conv.weight.grad for conv in two.convs]
        torch.testing.assert_close(one.convs[0].weight.grad, pair[0] + pair[1])  # type: ignore[operator]
        grad: Any = one.convs[0].weight.grad
        with torch.no_grad():  # a large weight, whose gradient is added by a hook
            for conv in (*one.convs, *two.convs):
                conv.weight.sub_(0.01 * grad)
        one.zero_grad()
        two.zero_grad()
