"""Conversion and its reversal, and whole converted networks against the slow reference."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import crossbn
from crossbn import nn as cnn
from crossbn.convert import _Converter
from tests.reference.cross_iteration import ReferenceNorm
from tests.support import Standardized, history_of, move_alike_, norm_of

KINDS: list[tuple[type[nn.Module], type[nn.Module], type[cnn.CrossIterBatchNorm]]] = [
    (nn.Conv1d, nn.BatchNorm1d, cnn.CrossIterBatchNorm1d),
    (nn.Conv2d, nn.BatchNorm2d, cnn.CrossIterBatchNorm2d),
    (nn.Conv3d, nn.BatchNorm3d, cnn.CrossIterBatchNorm3d),
    (nn.Conv2d, nn.SyncBatchNorm, cnn.CrossIterBatchNorm),
]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.AvgPool2d(2),
        nn.BatchNorm2d(4, track_running_stats=False),
    )


def batch() -> Tensor:
    return torch.randn(2, 2, 6, 6)


def test_report() -> None:
    report = crossbn.convert_(network(), window=3, filter_fn=lambda _, name: name != "4", unpaired="pool")
    assert [(record.name, record.producers) for record in report.compensated] == [("1", ("0",))]
    assert [(record.name, record.producers) for record in report.pooled] == [("6", ())]
    assert [(record.name, record.reason) for record in report.left] == [("4", "filter_fn says so")]
    assert "3 norms: 1 compensated, 1 pooled, 1 left alone" in str(report)


def test_report_of_a_trained_network_tells_of_the_prior() -> None:
    fresh, trained = network(), network()
    assert "prior" not in str(crossbn.convert_(fresh, window=3))
    trained(batch())
    belief = copy.deepcopy(trained)
    report = crossbn.convert_(trained, window=3)
    assert str(report).endswith('to fine-tune, prior="running" begins with them')
    assert report.summary().endswith(report.advice)
    assert "prior" not in str(crossbn.convert_(trained, window=4))  # of norms that it has already
    left = crossbn.convert_(copy.deepcopy(belief), window=3, filter_fn=lambda *_: False)
    assert "prior" not in str(left)
    assert "prior" not in str(crossbn.convert_(belief, window=3, prior="running"))


def test_state_dict_is_that_of_batchnorm() -> None:
    plain, model = network(), network()
    crossbn.convert_(model, window=3)
    for _ in range(3):
        model(batch())
        plain(batch())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    model.load_state_dict(plain.state_dict(), strict=True)
    x = batch()
    assert torch.equal(model.eval()(x), plain.eval()(x))
    model.train()(batch()).sum().backward()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model.eval()(x), plain(x))


def test_optimizer_made_before_goes_on() -> None:
    model = network()
    kept = list(model.named_parameters())
    buffers = dict(model.named_buffers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    crossbn.convert_(model, window=3)
    assert all(now is then for (_, now), (_, then) in zip(model.named_parameters(), kept, strict=True))
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    before = [parameter.detach().clone() for _, parameter in kept]
    for _ in range(2):
        optimizer.zero_grad()
        (model(batch()) * torch.randn(2, 4, 3, 3)).sum().backward()
        optimizer.step()
    moved = [not torch.equal(parameter, old) for (_, parameter), old in zip(kept, before, strict=True)]
    assert all(moved)


@pytest.mark.parametrize(("conv", "kind", "ours"), KINDS)
def test_every_kind_there_and_back(
    conv: type[nn.Module], kind: type[nn.Module], ours: type[cnn.CrossIterBatchNorm]
) -> None:
    model, untouched = (nn.Sequential(conv(2, 3, 1), kind(3, eps=0.1, momentum=0.3)) for _ in range(2))
    norm, parameters = model[1], list(model.parameters())
    crossbn.convert_(model, window=3)
    assert type(model[1]) is ours
    assert model[1] is norm
    crossbn.revert_(model)
    assert type(model[1]) is kind
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    for module, other in zip(model, untouched, strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
    assert hooks_of(model) == hooks_of(untouched)
    assert repr(model) == repr(untouched)


def hooks_of(model: nn.Module) -> list[int]:
    return [len(value) for module in model.modules() for name, value in module.__dict__.items() if "hooks" in name]


def test_reverted_copy_has_no_hooks_and_the_original_keeps_its_own() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 3, 1)), nn.BatchNorm2d(3))
    before = hooks_of(model)
    crossbn.convert_(model, window=3)
    twin = copy.deepcopy(model)
    crossbn.revert_(twin)
    assert hooks_of(twin) == before
    for _ in range(2):
        model(batch())
    assert int(history_of(model).num_steps) == 2


def test_reverted_trains_like_batchnorm() -> None:
    model, plain = network(), network()
    plain.load_state_dict(model.state_dict())
    crossbn.convert_(model, window=3)
    crossbn.revert_(model)
    for _ in range(2):
        x = batch()
        assert torch.equal(model(x), plain(x))


def test_converting_again_keeps_the_newest_steps() -> None:
    model = network()
    crossbn.convert_(model, window=5, burn_in=1)
    for _ in range(7):  # six are remembered, in four places
        model(batch())
    norm = norm_of(model)
    history = norm.segments[0].history
    oldest_first = [int(history.num_steps) % 4 - 4 + i for i in range(4)]
    means = history["mean"][oldest_first].clone()
    grads = history["0.var_grad"][oldest_first].clone()
    before = copy.deepcopy(model.state_dict())
    crossbn.convert_(model, window=3, burn_in=2, backward="detached")
    assert norm_of(model) is norm
    assert (norm.settings.window, norm.settings.burn_in, norm.settings.backward) == (3, 2, "detached")
    history = norm.segments[0].history
    assert torch.equal(history["mean"], means[2:])
    assert torch.equal(history["0.var_grad"], grads[2:])
    assert int(norm.burnt) == 1
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_converting_again_alike_changes_nothing() -> None:
    model = network()
    crossbn.convert_(model, window=3)
    for _ in range(3):
        model(batch())
    twin = copy.deepcopy(model)
    before = crossbn.history_state(model)
    crossbn.convert_(model, window=3)
    torch.testing.assert_close(crossbn.history_state(model), before, rtol=0, atol=0)
    assert len(model[0]._forward_hooks) == 1
    for x in (batch(), batch()):
        assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("windows", [(5, 3, 5), (5, 1, 3), (2, 4, 3)])
def test_set_window_pools_over_the_newest_steps(windows: tuple[int, int, int]) -> None:
    """Without weight changes the steps that are still there count like one batch with today's."""
    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).double()
    model = copy.deepcopy(plain)
    crossbn.convert_(model, window=windows[0], weights="equal")
    remembered: list[Tensor] = []
    for window in windows:
        crossbn.set_window_(model, window)
        for _ in range(3):
            remembered = remembered[max(0, len(remembered) - window + 1) :]
            together = [*remembered, batch().double()]
            torch.testing.assert_close(model(together[-1]), plain(torch.cat(together))[-2:], rtol=0, atol=1e-12)
            remembered = together if window > 1 else []
        remembered = remembered[max(0, len(remembered) - window + 1) :]


def test_set_window_out_of_range() -> None:
    model = network()
    crossbn.convert_(model, window=3)
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        crossbn.set_window_(model, 0)
    assert norm_of(model).settings.window == 3


def test_synchronized_stays_synchronized() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.SyncBatchNorm(3))
    crossbn.convert_(model, window=3)
    assert norm_of(model).settings.sync
    crossbn.convert_(model, window=4)
    assert norm_of(model).settings.sync
    assert model(batch()).shape == (2, 3, 6, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of window and batch_size, got None and None"),
        ({"window": 2, "batch_size": 4}, "exactly one of window and batch_size, got 2 and 4"),
        ({"window": 0}, "window must be an integer of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"window": 2, "burn_in": -3}, "burn_in must be an integer of at least 0, got -3"),
        ({"window": 2, "order": 3}, "order must be one of 0, 1, 2, got 3"),
        ({"window": 2, "positions": 0}, "positions must be an integer of at least 1, got 0"),
        ({"window": 2, "backward": "both"}, "backward must be one of 'through', 'detached', got 'both'"),
        ({"window": 2, "invalid": "clip"}, "invalid must be one of 'max', 'drop', got 'clip'"),
        ({"window": 2, "unpaired": "skip"}, "unpaired must be one of 'pool', 'bn', 'error', got 'skip'"),
        ({"window": 10**9}, "window must be at most 10000, got 1000000000"),
        ({"window": 2, "unpaired": "error"}, "no linear operator feeds 6: after avg_pool2d"),
        ({"window": 2, "pairs": {"9": "0"}}, "pairs names the norm '9', which the model does not have"),
        ({"window": 2, "pairs": {"2": "0"}}, "pairs names the norm '2', which the model does not have"),
        ({"window": 2, "pairs": {"1": "9"}}, "pairs names the producer '9' of 1"),
        ({"window": 2, "pairs": {"1": "2"}}, "pairs names the producer '2' of 1"),
        ({"window": 2, "pairs": {"4": "0"}}, "4 has 4 channels and its producer 0 3"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=message):
        crossbn.convert_(model, **options)
    assert not any(isinstance(module, cnn.CrossIterBatchNorm) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convert_", {"window": 4}),
        ("revert_", {}),
        ("fold", {}),
        ("set_window_", {"window": 2}),
        ("history_state", {}),
        ("load_history_state", {"state": {}}),
        ("recalibrate_", {"batches": []}),
        ("reset_history_", {}),
        ("swap_norm_", {"name": "gn"}),
        ("swap_norm_", {"name": "cbn"}),
    ],
)
def test_what_is_no_model_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"^{name} takes a model, a torch\.nn\.Module, got 'x'$"):
        getattr(crossbn, name)("x", **options)


@pytest.mark.parametrize("converted", [False, True])
def test_without_memory_for_the_last_norm_nothing_is_changed(converted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    if converted:
        crossbn.convert_(model, window=2)
    before = str(model)
    change = _Converter.convert_norm_

    def full(self: _Converter, name: str, *args: Any) -> None:
        change(self, name, *args)
        if name == "4":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 32 bytes.")

    monkeypatch.setattr(_Converter, "convert_norm_", full)
    with pytest.raises(ValueError, match="a window of 9000 steps does not fit into memory: DefaultCPUAllocator"):
        crossbn.convert_(model, window=9000)
    assert str(model) == before
    assert any(module._forward_hooks for module in model.modules()) is converted


def test_unpaired_norm_may_be_left() -> None:
    model = network()
    report = crossbn.convert_(model, window=3, unpaired="bn")
    assert [(record.name, record.reason) for record in report.left] == [("6", "after avg_pool2d")]
    assert type(model[6]) is nn.BatchNorm2d


class Renormed(nn.BatchNorm2d):
    """A subclass with behaviour of its own."""


def test_unknown_subclass_is_left_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), Renormed(3))
    (record,) = crossbn.convert_(model, window=3).left
    assert record.name == "1"
    assert "tests.test_convert.Renormed" in record.reason
    assert type(model[1]) is Renormed


def test_operator_with_a_forward_of_its_own_is_compensated_for_what_it_does() -> None:
    """Its weights double and its output stays; so must the statistics."""
    model = nn.Sequential(Standardized(2, 3, 1), nn.BatchNorm2d(3)).double()
    plain = copy.deepcopy(model)
    report = crossbn.convert_(model, window=2, weights="equal")
    assert [(record.name, record.producers) for record in report.pending] == [("1", ())]
    assert "1 norms: 0 compensated, 0 pooled, 0 left alone, 1 pending" in str(report)
    first, second = batch().double(), batch().double()
    model(first)
    (record,) = report.compensated
    assert (record.name, record.reason) == ("1", "read from the graph")
    assert report.pending == []
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[operator]
    torch.testing.assert_close(model(second), plain(torch.cat([first, second]))[2:], rtol=0, atol=1e-12)


class Chooser(nn.Module):
    """Tracing stops at the question which operator to take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        self.relu, self.after_relu = nn.ReLU(), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        out: Tensor = self.after_relu(self.relu(self.norm(self.conv(x))))
        return out


def test_the_first_training_forward_completes_the_report() -> None:
    model = Chooser()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is known yet
        report = crossbn.convert_(model, window=3)
        assert [record.name for record in report.pending] == ["norm", "after_relu"]
        model.eval()(batch())
        with torch.no_grad():
            model.train()(batch())
        assert len(report.pending) == 2
    with pytest.warns(crossbn.ConversionWarning, match=r"^1 of 2 norms stay BatchNorm: after relu \(1\)"):
        model(batch())
    assert [(record.name, record.producers) for record in report.compensated] == [("norm", ("conv",))]
    assert [(record.name, record.reason) for record in report.left] == [("after_relu", "after relu")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        model(batch())


def test_a_pending_norm_that_nothing_feeds_is_batchnorm() -> None:
    model = Chooser().double()
    plain = copy.deepcopy(model)
    crossbn.convert_(model, window=3, filter_fn=lambda _, name: name == "after_relu")
    for _ in range(3):
        x = batch().double()
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_pending_norm_that_nothing_feeds_may_be_pooled() -> None:
    model = Chooser().double()
    plain = copy.deepcopy(model)
    report = crossbn.convert_(
        model, window=2, unpaired="pool", filter_fn=lambda _, name: name == "after_relu", weights="equal"
    )
    plain.norm.eval()
    model.norm.eval()
    x, y = batch().double(), batch().double()
    model(x)
    torch.testing.assert_close(model(y), plain(torch.cat([x, y]))[2:], rtol=0, atol=1e-12)
    assert [record.name for record in report.pooled] == ["after_relu"]


def test_a_pending_norm_that_nothing_feeds_may_be_an_error() -> None:
    model = Chooser()
    crossbn.convert_(model, window=2, unpaired="error")
    with pytest.raises(ValueError, match="no linear operator feeds after_relu: after relu"):
        model(batch())


@pytest.mark.parametrize(("conv", "lazy"), [(nn.LazyConv2d(3, 3), "0.weight"), (nn.Conv2d(2, 3, 3), "1.weight")])
def test_lazy_modules(conv: nn.Module, lazy: str) -> None:
    model = nn.Sequential(conv, nn.LazyBatchNorm2d(), nn.ReLU())
    with pytest.raises(ValueError, match=f"'{lazy}' has no shape yet"):
        crossbn.convert_(model, window=3)
    model(batch())
    report = crossbn.convert_(model, window=3)
    assert [(record.name, record.producers) for record in report.compensated] == [("1", ("0",))]
    for _ in range(3):
        model(batch()).sum().backward()
    assert int(history_of(model).num_steps) == 3


class Twice(nn.Module):
    """One convolution, called for each of two inputs, and what `read` makes of it."""

    def __init__(self, read: Callable[["Twice", Tensor, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(6)
        self.left, self.right = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.read = read

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return self.read(self, x, y)


def first_convolve_then_normalize(net: Twice, x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = net.conv(x), net.conv(y)
    return [net.left(a), net.right(b)]


def one_norm_later(net: Twice, x: Tensor, y: Tensor) -> list[Tensor]:
    return [net.left(feature) for feature in [net.conv(x), net.conv(y)]]


SHARING: list[Callable[[Twice, Tensor, Tensor], list[Tensor]]] = [
    first_convolve_then_normalize,
    lambda net, x, y: [net.left(net.conv(x)), net.right(net.conv(y))],
    lambda net, x, y: [net.wide(torch.cat([net.conv(x), net.conv(y)], 1))],
]
GIVEN = {"left": "conv", "right": "conv"}


@pytest.mark.parametrize(("read", "pairs"), [*((read, None) for read in SHARING), (SHARING[1], GIVEN)])
def test_operator_called_twice_keeps_its_outputs_apart(
    read: Callable[[Twice, Tensor, Tensor], list[Tensor]], pairs: dict[str, str] | None
) -> None:
    """Without weight changes the norms see what BatchNorm sees in joined batches, each its own."""
    plain = Twice(read).double()
    model = copy.deepcopy(plain)
    crossbn.convert_(model, window=3, pairs=pairs, weights="equal")
    xs = [batch().double() for _ in range(3)]
    ys = [5 * batch().double() + 3 for _ in range(3)]
    for x, y in zip(xs, ys, strict=True):
        got = model(x, y)
    for ours, theirs in zip(got, plain(torch.cat(xs), torch.cat(ys)), strict=True):
        torch.testing.assert_close(ours, theirs[-2:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("read", [one_norm_later, lambda net, x, y: [net.left(net.conv(z)) for z in (x, y)]])
def test_norm_called_twice_keeps_its_calls_apart(read: Callable[[Twice, Tensor, Tensor], list[Tensor]]) -> None:
    plain = Twice(read).double()
    model = copy.deepcopy(plain)
    crossbn.convert_(model, window=2, weights="equal")
    xs, ys = [batch().double() for _ in range(3)], [2 * batch().double() + 3 for _ in range(3)]
    for i in range(3):
        for got, inputs in zip(model(xs[i], ys[i]), (xs, ys), strict=True):
            expected = plain.left(plain.conv(torch.cat(inputs[max(i - 1, 0) : i + 1])))[-2:]
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_norm_called_twice_outside_of_the_model_pools_its_calls() -> None:
    plain = Twice(one_norm_later).double()
    model = copy.deepcopy(plain)
    crossbn.convert_(model, window=2, weights="equal")
    x, y = batch().double(), 2 * batch().double()
    _, second = one_norm_later(model, x, y)
    expected = plain.left(plain.conv(torch.cat([x, y])))[2:]
    torch.testing.assert_close(second, expected, rtol=0, atol=1e-12)


def train_both(
    model: nn.Module,
    twin: nn.Module,
    forward: Callable[..., Tensor],
    inputs: Callable[[int], tuple[Tensor, ...]],
    steps: int = 4,
) -> None:
    """Move both nets by the same random steps; compare outputs and all gradients at each."""
    for step in range(steps):
        args = inputs(2 + step % 2)
        for each in (model, twin):
            each.zero_grad()
        out, expected = model(*args), forward(twin, *args)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
        weights = torch.randn_like(out)
        (out * weights).sum().backward()
        (expected * weights).sum().backward()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None, name
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-9)
        move_alike_(model, twin)


def sum_of(*convs: nn.Conv2d) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum of convolutions as one operator, of their inputs side by side and their weights in one row."""

    def call(y: Tensor, weight: Tensor) -> Tensor:
        inputs = y.split([conv.in_channels for conv in convs], 1)
        weights = weight.split([conv.weight.numel() for conv in convs])
        parts = [
            F.conv2d(each, flat.reshape(conv.weight.shape), padding=conv.padding)
            for conv, each, flat in zip(convs, inputs, weights, strict=True)
        ]
        return torch.stack(parts).sum(0)

    return call


def normalized_sum(
    reference: ReferenceNorm, norm: nn.Module, convs: list[nn.Conv2d], inputs: list[Tensor], rest: Tensor | float = 0.0
) -> Tensor:
    bias = torch.stack([conv.bias for conv in convs if conv.bias is not None]).sum(0)
    weight = torch.cat([conv.weight.flatten() for conv in convs])
    gamma, beta = norm.parameters()
    return reference(torch.cat(inputs, 1), weight, bias, gamma, beta, rest)[0]


class Residual(nn.Module):
    """norm(a(x) + b(y) + z)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.norm(self.a(x) + self.b(y) + z.relu())
        return out


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("backward", ["through", "detached"])
def test_residual_sum_equals_reference(order: int, backward: str) -> None:
    model = Residual().double()
    twin = copy.deepcopy(model)
    report = crossbn.convert_(model, window=3, positions=None, order=order, backward=backward, weights="equal")
    assert set(report.compensated[0].producers) == {"a", "b"}
    reference = ReferenceNorm(sum_of(twin.a, twin.b), window=3, order=order, backward=backward)

    def forward(net: Residual, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return normalized_sum(reference, net.norm, [net.a, net.b], [x, y], z.relu())

    def inputs(amount: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(amount, c, 4, 5, dtype=torch.float64) + 0.2 for c in (2, 4, 3))

    train_both(model, twin, forward, inputs)


class PreActivation(nn.Module):
    """A stem and two blocks; each norm reads the sum of everything before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.conv1, self.conv2 = (nn.Conv2d(c, 3, 3, padding=1) for c in (2, 3, 3))
        self.norm0, self.norm1, self.norm2 = (nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv0(x)
        x = x + self.conv1(self.norm0(x).relu())
        x = x + self.conv2(self.norm1(x).relu())
        out: Tensor = self.norm2(x)
        return out


def test_pre_activation_chain_equals_reference() -> None:
    model = PreActivation().double()
    twin = copy.deepcopy(model)
    report = crossbn.convert_(model, window=3, positions=None, weights="equal")
    assert [len(record.producers) for record in report.compensated] == [1, 2, 3]
    convs, norms = [twin.conv0, twin.conv1, twin.conv2], [twin.norm0, twin.norm1, twin.norm2]
    references = [ReferenceNorm(sum_of(*convs[: i + 1]), window=3) for i in range(3)]

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        inputs = [x]
        for i in range(3):
            out = normalized_sum(references[i], norms[i], convs[: i + 1], inputs)
            inputs.append(out.relu())
        return out

    train_both(model, twin, forward, lambda amount: (torch.randn(amount, 2, 4, 4, dtype=torch.float64),))


class Dense(nn.Module):
    """Two layers that read all maps before them, the input included, and a norm over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.conv1, self.conv2 = nn.Conv2d(2, 3, 1), nn.Conv2d(5, 2, 3, padding=1), nn.Conv2d(7, 2, 1)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(c) for c in (5, 7, 9))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x, self.conv0(x)]
        maps.append(self.conv1(self.norm1(torch.cat(maps, 1)).relu()))
        maps.append(self.conv2(self.norm2(torch.cat(maps, 1)).relu()))
        out: Tensor = self.norm3(torch.cat(maps, 1))
        return out


@pytest.mark.parametrize("order", [1, 2])
def test_shared_sources_equal_a_reference_per_slice(order: int) -> None:
    model = Dense().double()
    twin = copy.deepcopy(model)
    report = crossbn.convert_(model, window=3, positions=None, order=order, unpaired="pool", weights="equal")
    assert [len(record.producers) for record in report.compensated] == [1, 2, 3]
    convs = [twin.conv0, twin.conv1, twin.conv2]
    references = {
        norm: [
            ReferenceNorm(lambda y, _: y, window=3, order=0),
            *(ReferenceNorm(sum_of(conv), window=3, order=order) for conv in convs),
        ]
        for norm in (twin.norm1, twin.norm2, twin.norm3)
    }

    def normalized(norm: nn.BatchNorm2d, inputs: list[Tensor]) -> Tensor:
        """`inputs`: the net's input, then what each convolution read."""
        slices, start = [], 0
        for i, (reference, y) in enumerate(zip(references[norm], inputs, strict=False)):
            conv = convs[i - 1] if i else None
            weight, bias = (conv.weight.flatten(), conv.bias) if conv else (torch.zeros(()), 0.0)
            stop = start + (conv.out_channels if conv else y.shape[1])
            assert bias is not None
            slices.append(reference(y, weight, bias, norm.weight[start:stop], norm.bias[start:stop])[0])
            start = stop
        return torch.cat(slices, 1)

    def forward(net: Dense, x: Tensor) -> Tensor:
        inputs = [x, x]
        for norm in (net.norm1, net.norm2):
            inputs.append(normalized(norm, inputs).relu())
        return normalized(net.norm3, inputs)

    train_both(model, twin, forward, lambda amount: (torch.randn(amount, 2, 4, 3, dtype=torch.float64) + 0.1,))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights_equal_reference(name: str, order: int) -> None:
    """Through to the tensors that the weight is computed from; spectral normalization iterates once a step, no more."""
    model = nn.Sequential(getattr(parametrizations, name)(nn.Conv2d(2, 3, 3)), nn.BatchNorm2d(3)).double()
    twin = copy.deepcopy(model)
    crossbn.convert_(model, window=3, positions=None, order=order, weights="equal")
    reference = ReferenceNorm(lambda y, weight: F.conv2d(y, weight), window=3, order=order)

    def forward(net: nn.Sequential, x: Tensor) -> Tensor:
        conv, norm = net
        gamma, beta = norm.parameters()
        return reference(x, conv.weight, conv.bias, gamma, beta)[0]  # type: ignore[arg-type]

    train_both(model, twin, forward, lambda amount: (torch.randn(amount, 2, 6, 6, dtype=torch.float64),))
    torch.testing.assert_close(dict(model[0].named_buffers()), dict(twin[0].named_buffers()))


def test_converting_leaves_parametrizations_alone() -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), nn.BatchNorm2d(3))
    before = copy.deepcopy(model.state_dict())
    crossbn.convert_(model, window=3)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
