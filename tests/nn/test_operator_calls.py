"""What feeds a norm is what is called, however it is written; where nothing linear does, the norm stays BatchNorm."""

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import crossbn
from tests.reference.cross_iteration import moments
from tests.support import move_alike_

EXACT: dict[str, Any] = {"window": 3, "order": 2, "positions": None, "decay": 1.0}


class Fed(nn.Module):
    """A norm and the module that feeds it."""

    def __init__(self, operator: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.operator, self.norm = operator, norm

    def before(self, x: Tensor) -> Tensor:
        out: Tensor = self.operator(x)
        return out

    def after(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.before(x)))


class Padding(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 2, 0, 1)), self.weight, self.bias, stride=2)


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


class Functional(nn.Module):
    def __init__(self, operation: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.operation, self.w = operation, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.w)


class DataDependent(Fed):
    def before(self, x: Tensor) -> Tensor:
        return super().before(-x if x.sum() > 0 else x)


class Flattened(Fed):
    def before(self, x: Tensor) -> Tensor:
        return super().before(x).flatten(0, 1)

    def after(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1, 4)


class Transposed(Fed):
    def before(self, x: Tensor) -> Tensor:
        return super().before(x).transpose(1, 2)


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(3, 4, 3, **options)


FED: dict[str, tuple[Callable[[], Fed], tuple[int, ...]]] = {
    "padding subclass": (lambda: Fed(Padding(3, 4, 3), nn.BatchNorm2d(4)), (3, 6, 6)),
    "functional convolution": (lambda: Fed(Functional(F.conv2d, 4, 3, 3, 3), nn.BatchNorm2d(4)), (3, 6, 6)),
    "functional transposed": (lambda: Fed(Functional(F.conv_transpose2d, 3, 4, 2, 2), nn.BatchNorm2d(4)), (3, 4, 4)),
    "functional linear": (lambda: Fed(Functional(F.linear, 4, 3), nn.BatchNorm1d(4)), (3,)),
    "weight standardization": (lambda: Fed(Standardized(3, 4, 3), nn.BatchNorm2d(4)), (3, 6, 6)),
    "weight norm": (lambda: Fed(parametrizations.weight_norm(conv()), nn.BatchNorm2d(4)), (3, 6, 6)),
    "data-dependent control flow": (lambda: DataDependent(conv(), nn.BatchNorm2d(4)), (3, 6, 6)),
    "circular padding": (lambda: Fed(conv(padding=1, padding_mode="circular"), nn.BatchNorm2d(4)), (3, 6, 6)),
    "flattened linear": (lambda: Flattened(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3)),
    "transposed linear": (lambda: Transposed(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3)),
}


def batch(*shape: int) -> Tensor:
    return torch.randn(2 if len(shape) > 1 else 6, *shape, dtype=torch.float64) + 0.3


def pooled(xs: Sequence[Tensor], norm: nn.Module) -> Tensor:
    """The last of `xs` normalized with the raw moments of all of them, each weighing the same."""
    means, seconds = (torch.stack(each).mean(0) for each in zip(*map(moments, xs), strict=True))
    shape = (-1, *[1] * (xs[-1].ndim - 2))
    scale = norm.get_parameter("weight") / torch.sqrt(seconds - means.square() + 1e-5)
    return (xs[-1] - means.reshape(shape)) * scale.reshape(shape) + norm.get_parameter("bias").reshape(shape)


def gradients(out: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(out.sin().sum(), list(model.parameters())))


def assert_near(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", FED)
def test_compensated_as_if_run_again_with_todays_weights(name: str) -> None:
    make, shape = FED[name]
    plain = make().double()
    model = copy.deepcopy(plain)
    report = crossbn.convert_(model, **EXACT)
    xs: list[Tensor] = []
    for _ in range(4):
        xs = [*xs, batch(*shape)][-3:]
        out = model(xs[-1])
        assert [record.name for record in report.compensated] == ["norm"]
        expected = plain.after(pooled([plain.before(x) for x in xs], plain.norm))
        assert_near(out, expected)
        assert_near(gradients(out, model), gradients(expected, plain))
        move_alike_(model, plain, size=0.1)


def replace_forward(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def trick(operator: nn.Module) -> None:
        forward = type(operator).forward
        operator.forward = lambda x: change(forward(operator, x))

    return trick


def replace_weight(operator: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    operator.weight = nn.Parameter(torch.randn(4, 3, 3, 3, generator=generator, dtype=torch.float64))


TRICKS: dict[str, Callable[[nn.Module], Any]] = {
    "hook": lambda operator: operator.register_forward_hook(lambda _module, _args, out: out * 2),
    "stride": lambda operator: setattr(operator, "stride", (2, 2)),
    "forward times 2": replace_forward(lambda x: 2 * x),
    "forward plus 1": replace_forward(lambda x: x + 1),
    "weight": replace_weight,
}


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "whole": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
}


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_operator_that_does_something_else(
    trick: Callable[[nn.Module], None], at: int, run: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Then the norm is BatchNorm or pools what the operator really gives: nothing in between."""
    plain = Fed(conv(bias=False), nn.BatchNorm2d(4)).double()
    model = copy.deepcopy(plain)
    crossbn.convert_(model, **EXACT)
    xs: list[Tensor] = []
    for step in range(at + 5):
        if step == at:
            xs = []  # what was before was of another operator
            trick(model.operator)
            trick(plain.operator)
        xs = [*xs, batch(3, 7, 7)]
        out = run(model, xs[-1].clone())
        inputs = [plain.before(x) for x in xs[-3:]]
        candidates = [pooled(inputs[-k:], plain.norm) for k in range(1, len(inputs) + 1)]
        if step < at or step >= at + 2:  # just after the trick the window may hold both kinds
            fits = [each for each in candidates if torch.allclose(out, each, rtol=1e-8, atol=1e-8)]
            assert fits, f"step {step}"
            model.zero_grad()
            out.sin().sum().backward()
            assert_near([p.grad for p in model.parameters()], gradients(fits[0], plain))
        move_alike_(model, plain, size=0.1)


class Levels(nn.Module):
    """A head that is shared by the levels of a pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(bias=False), nn.BatchNorm2d(4)

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        return [self.norm(self.conv(level)) for level in levels]


@pytest.mark.parametrize("calls", [[3] * 6, [3, 2, 3, 1, 3, 3], [1, 2, 3, 2, 3, 1]], ids=str)
@pytest.mark.parametrize("order", [1, 2])
def test_levels_of_a_pyramid_do_not_mix(calls: list[int], order: int) -> None:
    model = Levels().double()
    apart = [copy.deepcopy(model) for _ in range(3)]
    for each in (model, *apart):
        crossbn.convert_(each, **{**EXACT, "order": order})
    for amount in calls:
        levels = [(1 + 5 * i) * batch(3, size, size) + i for i, size in enumerate((9, 6, 4)[:amount])]
        outs = model(levels)
        expected = [one([level])[0] for one, level in zip(apart, levels, strict=False)]
        assert_near(outs, expected)
        summed = [gradients(out, one) for out, one in zip(expected, apart, strict=False)]
        ours = torch.autograd.grad(sum(out.sin().sum() for out in outs), list(model.parameters()))
        assert_near(list(ours), [torch.stack(each).sum(0) for each in zip(*summed, strict=True)])
        move_alike_(model, *apart, size=0.1)


def test_streams_do_not_mix() -> None:
    model = Levels().double()
    real, generated = copy.deepcopy(model), copy.deepcopy(model)
    for each in (model, real, generated):
        crossbn.convert_(each, **EXACT)
    for _ in range(5):
        x, fake = batch(3, 6, 6), 3 * batch(3, 6, 6) - 2
        assert_near(model([x]), real([x]))
        with crossbn.stream("generated"):
            assert_near(model([fake]), generated([fake]))
        move_alike_(model, real, generated, size=0.1)


UNPAIRED: dict[str, tuple[Callable[[], nn.Sequential], int]] = {
    "relu": (lambda: nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(4)), 2),
    "pool": (lambda: nn.Sequential(conv(), nn.MaxPool2d(2), nn.BatchNorm2d(4)), 2),
    "input": (lambda: nn.Sequential(nn.BatchNorm2d(3), conv()), 0),
}
NOTHING_LINEAR = pytest.mark.parametrize("name", UNPAIRED)


@NOTHING_LINEAR
def test_norm_without_an_operator_stays_batchnorm(name: str) -> None:
    make, place = UNPAIRED[name]
    plain = make()
    model = copy.deepcopy(plain)
    report = crossbn.convert_(model, window=3)
    for _ in range(4):
        x = batch(3, 8, 8).float()
        out, expected = model(x), plain(x)
        assert torch.equal(out, expected)
        assert all(map(torch.equal, gradients(out, model), gradients(expected, plain)))
        assert all(map(torch.equal, model.buffers(), plain.buffers()))
        move_alike_(model, plain, size=0.1)
    assert [(record.name, bool(record.reason)) for record in report.left] == [(str(place), True)]
    assert report.compensated == report.pooled == []


@NOTHING_LINEAR
def test_norm_without_an_operator_pools_if_told_to(name: str) -> None:
    make, place = UNPAIRED[name]
    plain = make().double()
    model = copy.deepcopy(plain)
    report = crossbn.convert_(model, unpaired="pool", **EXACT)
    xs = []
    for _ in range(3):
        x = batch(3, 8, 8)
        xs.append(plain[:place](x).detach())
        out = model(x)
        assert_near(out, plain[place + 1 :](pooled(xs, plain[place])))
        move_alike_(model, plain, size=0.1)
    assert [record.name for record in report.pooled] == [str(place)]


def convert_and_train(model: nn.Module, **options: Any) -> None:
    crossbn.convert_(model, window=3, **options)
    for _ in range(3):
        model(batch(3, 8, 8).float()).sum().backward()


@NOTHING_LINEAR
def test_norm_without_an_operator_is_an_error_if_told_to(name: str) -> None:
    make, place = UNPAIRED[name]
    with pytest.raises(ValueError, match=str(place)):
        convert_and_train(make(), unpaired="error")


def chain(compensated: int, left: int) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(compensated)]
    return nn.Sequential(*blocks, nn.Conv2d(3, 3, 1), nn.ReLU(), *(nn.BatchNorm2d(3) for _ in range(left)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: chain(8, 2), ("relu", "unpaired")),
        (lambda: chain(0, 1), ("relu", "unpaired")),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), ("norm",)),
    ],
    ids=["too few", "none", "no norm"],
)
def test_warned_once_where_little_is_compensated(make: Callable[[], nn.Module], words: tuple[str, ...]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_and_train(make())
    assert [each.category for each in caught] == [crossbn.ConversionWarning]
    assert issubclass(crossbn.ConversionWarning, UserWarning)
    assert all(word in str(caught[0].message).lower() for word in words)


@pytest.mark.parametrize(
    "make", [lambda: chain(9, 1), lambda: chain(1, 0), lambda: DataDependent(conv(), nn.BatchNorm2d(4))]
)
def test_no_warning_where_nine_tenths_are(make: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_and_train(make())


class Dense(nn.Module):
    """Convolutions whose outputs are concatenated again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(6 * i, 6, 3, padding=1, bias=False) for i in (1, 2, 3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6 * i) for i in (1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(norm(torch.cat(features, 1)).relu()))
        return torch.cat(features, 1)


class Steps(nn.Module):
    """A forward with several forwards and backwards in it, as a training step of an engine may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Dense()
        self.inputs: list[weakref.ref[Any]] = []
        self.net.convs[0].register_forward_pre_hook(
            lambda _, args: self.inputs.append(weakref.ref(args[0].untyped_storage()))
        )

    def forward(self, x: Tensor) -> list[bool]:
        for _ in range(3):
            self.net(x).square().sum().backward()
        return [known() is not None for known in self.inputs]


def test_what_a_convolution_read_is_gone_after_the_backward() -> None:
    model = Steps()
    crossbn.convert_(model, window=4)
    assert not any(model(torch.randn(2, 3, 8, 8)))


def test_one_convolution_read_in_two_layouts() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Conv2d(3, 8, 3, padding=1, bias=False) for _ in range(2))
            self.norm, self.other = nn.BatchNorm2d(16), nn.BatchNorm2d(12)

        def forward(self, x: Tensor) -> Tensor:
            outputs = [self.a(x), self.b(x)]
            return self.norm(torch.cat(outputs, 1)).sum() + self.other(torch.cat(outputs, 3).permute(0, 3, 1, 2)).sum()

    model = Both()
    report = crossbn.convert_(model, window=3)
    for _ in range(2):
        model(torch.randn(2, 3, 6, 6)).backward()
    assert report.summary() == "2 norms: 1 compensated, 0 pooled, 1 left alone"


def test_a_convolution_that_is_twice_in_a_concatenation_is_remembered_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            out: Tensor = self.norm(torch.cat([y, y], 1))
            return out

    model = Twice()
    crossbn.convert_(model, window=4)
    for step in range(1, 4):
        model(torch.randn(2, 3, 6, 6)).square().sum().backward()
        norm: Any = model.norm
        assert [int(segment.history.num_steps) for segment in norm.segments] == [step, step]


@pytest.mark.parametrize("kernel", [1, 9])  # gradients are kept of the one, patches of the other
def test_a_sample_that_differs_at_a_few_of_many_channels_is_noticed(kernel: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 160, kernel, bias=False), nn.BatchNorm2d(160))

    def turn(_: nn.Module, __: Any, output: Tensor) -> None:
        output.data[:, 32:] = output.data[:, 32:].flip(-1)  # unseen by the graph, and the mean is the same

    crossbn.convert_(model, window=4)
    model[0].register_forward_hook(turn)
    model(torch.randn(2, 3, 12, 12))
    model(torch.randn(2, 3, 12, 12))
    with pytest.warns(crossbn.ConversionWarning, match="its input is not what the operator's weight makes"):
        model(torch.randn(2, 3, 12, 12))  # 16 channels are compared at a step
