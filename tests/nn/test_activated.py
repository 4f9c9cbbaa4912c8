"""Compensation through an activation, against the slow reference and by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn import functional as C
from crossbn import ops
from crossbn.ops import cpu
from crossbn.pairing.graph import read_calls
from tests.nn.test_oracle import OPERATORS, assert_near, norm_for
from tests.ops.test_cpu import train, twice
from tests.reference.cross_iteration import ReferenceNorm
from tests.support import compiled_code, move_

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "silu in place": lambda: nn.SiLU(inplace=True),
    "leaky relu": lambda: nn.LeakyReLU(0.2),
    "tanh": nn.Tanh,
}


def reference_operator(module: nn.Module, act: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The activated operator as a function of its input and of weight and bias as one vector."""
    plain = copy.deepcopy(module).double()
    plain._forward_hooks.clear()
    sizes = [parameter.numel() for parameter in plain.parameters()]
    names, shapes = zip(*((name, p.shape) for name, p in plain.named_parameters()), strict=True)

    def call(y: Tensor, flat: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        output: Tensor = act(torch.func.functional_call(plain, dict(zip(names, parts, strict=True)), (y,)))
        return output

    return call


def check(module: nn.Module, act: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
    """Train a few steps; compare output, gradients and running statistics with the reference at each."""
    norm = norm_for(module, len(shape) - 1, window=3, compensate_through="activations", **options).to(dtype)
    norm.feeds.release()  # what it is attached to: the graph tells
    norm.feeds.unpaired = "error"
    module.to(dtype)
    own, rest = list(module.parameters()), list(norm.parameters())
    reference = ReferenceNorm(reference_operator(module, act), window=3)
    running_mean, running_var = torch.zeros(norm.num_features).double(), torch.ones(norm.num_features).double()
    for batch in (2, 3, 2, 1, 4):
        y = (torch.randn(batch, *shape, dtype=torch.float64) + 0.3).to(dtype)
        ours_in, reference_in = y.clone().requires_grad_(), y.double().clone().requires_grad_()
        twins = [p.detach().double().clone().requires_grad_() for p in own + rest]
        out = norm(act(module(ours_in)))
        flat = torch.cat([twin.flatten() for twin in twins[: len(own)]])
        expected, mean, var, count = reference(reference_in, flat, 0.0, *twins[len(own) :])
        assert_near(out, expected, dtype)
        output_grad = torch.randn_like(expected).to(dtype)
        grads = torch.autograd.grad(out, [ours_in, *own, *rest], output_grad)
        wanted = torch.autograd.grad(expected, [reference_in, *twins], output_grad.double())
        for got, want in zip(grads, wanted, strict=True):
            assert_near(got, want, dtype)
        running_mean = 0.9 * running_mean + 0.1 * mean
        running_var = 0.9 * running_var + 0.1 * var * count / (count - 1)
        assert_near(norm.running_mean, running_mean, dtype)
        assert_near(norm.running_var, running_var, dtype)
        move_(own + rest)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_equals_the_reference(name: str) -> None:
    make, shape = OPERATORS[name]
    torch.manual_seed(1)
    check(make(), nn.GELU(), shape, torch.float64, positions=None)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_activation_equals_the_reference(act: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(nn.Conv2d(3, 4, 3, padding=1), ACTIVATIONS[act](), (3, 6, 5), dtype, positions=None)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
def test_samples_of_all_positions_equal_the_reference(name: str) -> None:
    make, shape = OPERATORS[name]
    torch.manual_seed(1)
    check(make(), nn.GELU(), shape, torch.float32, positions=999)


def mixer(act: Callable[[], nn.Module]) -> nn.Sequential:
    convolutions = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 3, groups=8, padding=1, bias=False), nn.Conv2d(8, 6, 1)
    return nn.Sequential(*(each for conv in convolutions for each in (conv, act(), nn.BatchNorm2d(conv.out_channels))))


@pytest.mark.parametrize("act", ["relu in place", "gelu"])
@pytest.mark.parametrize("positions", [8, 128])
def test_compiled_code_trains_the_same(act: str, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network, seen, step = mixer(ACTIVATIONS[act]), list[str](), cpu.step

    def watch(inputs: ops.StepInputs, past: ops.Past, storage: C.Storage | None, settings: C.Settings) -> Any:
        found = step(inputs, past, storage, settings)
        seen.extend([] if found is None else [type(storage).__name__])
        return found

    monkeypatch.setattr(cpu, "step", watch)
    twice(lambda: train(network, compensate_through="activations", positions=positions))
    assert seen == ["ActivatedStorage"] * 7 * 3


def converted(*modules: nn.Module, **options: Any) -> tuple[nn.Sequential, crossbn.ConversionReport]:
    model = nn.Sequential(*modules)
    options = {"window": 3, "compensate_through": "activations", **options}
    return model, crossbn.convert_(model, **options)


def test_the_report_says_through_what() -> None:
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    model, report = converted(
        *(nn.Conv2d(3, 4, 3), nn.GELU(), norms[0]),
        *(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), norms[1]),
        *(nn.Softmax(1), norms[2]),
    )
    assert [record.status for record in report.records] == ["pending"] * 3
    with pytest.warns(crossbn.ConversionWarning, match="1 of 3 norms stay BatchNorm: after softmax"):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert [(record.status, record.producers, record.reason) for record in report.records] == [
        ("compensated", ("0",), "through gelu, read from the graph"),
        ("compensated", ("3",), "through relu, read from the graph"),
        ("left alone", (), "after softmax"),
    ]


@pytest.mark.filterwarnings("ignore:1 of 1 norms stay")
def test_it_is_left_alone_unless_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))
    report = crossbn.convert_(model, window=3)
    assert [(record.status, record.reason) for record in report.records] == [("left alone", "after relu")]


@pytest.mark.parametrize("order", [0, 2])
def test_the_first_order_is_the_only_one(order: int) -> None:
    with pytest.raises(ValueError, match=f"compensate_through needs order=1, got order={order}"):
        crossbn.nn.CrossIterBatchNorm2d(4, order=order, compensate_through="activations")


def test_samples_are_unbiased() -> None:
    """Averaged over as many steps as there are positions, what a sample says of the moments is what all of them say."""
    torch.manual_seed(0)
    conv, act = nn.Conv2d(3, 4, 3, dtype=torch.float64), nn.GELU()
    y = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    change = torch.randn(4, 28, dtype=torch.float64)

    def taylor_terms(positions: int | None, step: int) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"window": 2, "compensate_through": "activations", "positions": positions}
        norm = crossbn.nn.CrossIterBatchNorm2d(4, **options).double()
        x = act(conv(y))
        norm(x)
        (segment,) = norm.segments
        operands, _ = segment.operands(x.detach(), [read_calls(x, through=True)[0].calls[0]])
        weights = [C.flatten_weight(conv.weight.detach(), operands[0].geometry, operands[0].bias)]
        mean, var = C.batch_moments(x.detach())
        seen = C.Observation(x.detach(), mean, var, None, operands, weights, step, None, True)
        assert segment.storage is not None
        row, is_theirs = segment.storage.remember(seen)
        assert is_theirs
        kept = {name: value.unsqueeze(0) for name, value in row.items()}
        terms = segment.storage.look_back(kept, [weights[0] + change]).terms
        return terms.mean_shift[0], terms.var_slope[0]

    exact = taylor_terms(None, 0)
    samples = [taylor_terms(5, step) for step in range(24)]  # 24 positions
    for i in range(2):
        sampled = torch.stack([terms[i] for terms in samples])
        torch.testing.assert_close(sampled.mean(0), exact[i])
        assert (sampled - exact[i]).abs().max() > 0.1 * exact[i].abs().max()


def test_another_input_than_the_activations_is_plain() -> None:
    torch.manual_seed(0)
    (conv, act, norm), _ = converted(nn.Conv2d(3, 4, 3), nn.GELU(), nn.BatchNorm2d(4))
    assert isinstance(norm, crossbn.nn.CrossIterBatchNorm2d)
    norm(act(conv(torch.randn(2, 3, 8, 8))))
    x = act(conv(torch.randn(2, 3, 8, 8)))
    with torch.no_grad():
        x.mul_(1.5)  # which the graph does not know
    plain = nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
    with pytest.warns(crossbn.ConversionWarning, match="not what the operator's weight makes"):
        torch.testing.assert_close(norm(x), plain)
    assert int(norm.segments[0].history.num_steps) == 1


def test_parts_of_a_concatenation_and_terms_of_a_sum() -> None:
    a, b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    y = torch.randn(2, 3, 6, 6)
    parts = read_calls(torch.cat([a(y).relu(), b(y)], 1), through=True)
    assert [(part.reason, part.direct) for part in parts] == [
        ("convolution, through relu", False),
        ("convolution", True),
    ]
    (part,) = read_calls(a(y).relu() + b(y), through=True)
    assert (part.reason, part.activation) == ("convolution + rest", None)
    assert [call.parameter for call in part.calls] == [b.weight]
    reasons = [read_calls(x, through=True)[0].reason for x in ((a(y) + b(y)).relu(), a(y).tanh().relu())]
    assert reasons == ["after relu", "after relu"]


def test_double_backward_equals_the_reference() -> None:
    torch.manual_seed(0)
    conv, act = nn.Conv2d(3, 4, 3).double(), nn.GELU()
    options: dict[str, Any] = {"window": 3, "weights": "equal", "positions": None, "compensate_through": "activations"}
    norm = crossbn.nn.CrossIterBatchNorm2d(4, **options).double()
    reference = ReferenceNorm(reference_operator(conv, act), window=3)
    gamma, beta = torch.ones(4).double(), torch.zeros(4).double()
    for step in range(3):
        y = torch.randn(2, 3, 5, 5, dtype=torch.float64)
        weight, bias = (parameter.detach().clone().requires_grad_() for parameter in conv.parameters())
        out = norm(act(conv(y)))
        expected = reference(y, torch.cat([weight.flatten(), bias]), 0.0, gamma, beta)[0]
        if step == 2:
            target, second = torch.randn_like(out), []
            for result, parameters in ((out, list(conv.parameters())), (expected, [weight, bias])):
                first = torch.autograd.grad((result * target).square().sum(), parameters, create_graph=True)
                norm_of = torch.cat([each.flatten() for each in first]).square().sum()
                second.append(torch.autograd.grad(norm_of, parameters))
            for got, want in zip(*second, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)
        move_(conv.parameters())


def test_a_saved_history_goes_on_where_it_was() -> None:
    torch.manual_seed(0)
    batches = torch.randn(4, 2, 3, 8, 8)

    def network() -> nn.Sequential:
        act = nn.LeakyReLU(0.3)
        return converted(
            nn.Conv2d(3, 4, 3), act, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.GELU("tanh"), nn.BatchNorm2d(4)
        )[0]

    first, second = network(), network()
    for batch in batches[:3]:
        first(batch)
    second.load_state_dict(first.state_dict())
    crossbn.load_history_state(second, crossbn.history_state(first))
    assert torch.equal(second(batches[3]), first(batches[3]))
    assert [norm.segments[0].activation.name for norm in (second[2], second[5])] == ["leaky_relu", "gelu"]  # type: ignore[union-attr, index]


def test_a_history_of_another_activation_is_refused() -> None:
    (first, _), (second, _) = (converted(nn.Conv2d(3, 4, 3), act, nn.BatchNorm2d(4)) for act in (nn.ReLU(), nn.GELU()))
    for model in (first, second):
        model(torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match="it was saved of other operators"):
        crossbn.load_history_state(second, crossbn.history_state(first))


def test_bfloat16_autocast_is_compensated() -> None:
    torch.manual_seed(0)
    model, report = converted(nn.Conv2d(3, 8, 3), nn.GELU(), nn.BatchNorm2d(8))
    twin = copy.deepcopy(model)
    for _ in range(3):
        batch = torch.randn(2, 3, 8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(batch)
        rounded.square().sum().backward()
        exact = twin(batch)
        exact.square().sum().backward()
        torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)
        with torch.no_grad():
            for network in (model, twin):
                generator = torch.Generator().manual_seed(1)
                for parameter in network[0].parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    assert len(report.compensated) == 1
    assert int(model[2].segments[0].history.num_steps) == 3  # type: ignore[index, union-attr]  # modules are untyped


@pytest.mark.parametrize("positions", [8, None])
def test_a_batch_that_is_not_finite_leaves_no_trace(positions: int | None) -> None:
    torch.manual_seed(0)
    model, report = converted(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.BatchNorm2d(4), positions=positions)
    norm = model[2]
    assert isinstance(norm, crossbn.nn.CrossIterBatchNorm2d)
    model(torch.randn(2, 3, 8, 8))
    kept = {name: value.clone() for name, value in crossbn.history_state(model).items()}
    running = norm.running_var.clone()  # type: ignore[union-attr]  # it tracks
    wrong = torch.randn(2, 3, 8, 8)
    wrong[0, 0, 0, 0] = torch.inf
    assert not model(wrong).isfinite().all()
    assert torch.equal(running, norm.running_var)  # type: ignore[arg-type]  # it tracks
    assert all(torch.equal(value, kept[name]) for name, value in crossbn.history_state(model).items())
    assert model(torch.randn(2, 3, 8, 8)).isfinite().all()
    assert int(norm.segments[0].history.num_steps) == 2
    assert len(report.compensated) == 1


@pytest.mark.parametrize("act", [nn.Sigmoid, nn.Hardtanh])
@pytest.mark.parametrize("native", [True, False])
def test_an_infinite_input_that_an_activation_bounds_is_not_remembered(
    act: Callable[[], nn.Module], native: bool
) -> None:
    model, _ = converted(nn.Conv2d(3, 8, 3), act(), nn.BatchNorm2d(8), window=4)
    with compiled_code(native):
        for step in range(5):
            x = torch.randn(2, 3, 6, 6)
            x[0, 0, 2, 2] = -torch.inf if step == 2 else 0.0
            assert model(x).isfinite().all()
    norm: Any = model[2]
    (segment,) = norm.segments
    assert int(segment.history.num_steps) == 4
    assert all(ring.isfinite().all() for ring in segment.history.rings.values())


def test_autocast_around_the_norm_alone_changes_nothing() -> None:
    torch.manual_seed(0)
    model, _ = converted(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), window=4)
    twin, batches = copy.deepcopy(model), [torch.randn(2, 3, 6, 6) + 10 for _ in range(4)]
    for x in batches:
        y, before = model(x), twin[1](twin[0](x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(twin[2](before), y)


def test_unchanged_weights_move_nothing_beside_a_large_mean() -> None:
    torch.manual_seed(0)
    model, _ = converted(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), window=4)
    nn.init.uniform_(next(model.parameters()), 0, 1)
    x = torch.randn(2, 3, 6, 6) + 1e4
    expected = nn.BatchNorm2d(8).double()(model[0](x).detach().double())
    for _ in range(4):
        y = model(x)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=0.015)
