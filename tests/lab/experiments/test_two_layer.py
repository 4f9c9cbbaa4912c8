"""Compensation over two layers: against brute force, its order of accuracy, and what must not change."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.lab.experiments.two_layer import extend_
from tests.reference.cross_iteration import ReferenceNorm
from tests.reference.two_layers import DeepReferenceNorm, Parameters, TwoLayers
from tests.support import functional_form, move_, norm_of

Case = tuple[Callable[[], nn.Module], nn.Module, Callable[[], nn.Module], tuple[int, ...]]

NETWORKS: dict[str, Case] = {
    "linear": (lambda: nn.Linear(5, 4, bias=False), nn.Tanh(), lambda: nn.Linear(4, 3, bias=False), (5,)),
    "linear, relu, biases": (lambda: nn.Linear(5, 4), nn.ReLU(), lambda: nn.Linear(4, 3), (5,)),
    "conv, relu": (
        lambda: nn.Conv2d(2, 3, 3, bias=False),
        nn.ReLU(),
        lambda: nn.Conv2d(3, 4, 2, bias=False),
        (2, 6, 5),
    ),
    "padding, stride, biases": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), stride=(1, 2)),
        (2, 7, 6),
    ),
    "pooling, groups": (
        lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.Sequential(nn.SiLU(), nn.MaxPool2d(2)),
        lambda: nn.Conv2d(4, 4, 2, groups=2, bias=False),
        (2, 6, 6),
    ),
    "nothing between, 1d": (lambda: nn.Conv1d(2, 3, 3), nn.Identity(), lambda: nn.Conv1d(3, 2, 2), (2, 7)),
    "transposed": (
        lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, bias=False),
        nn.GELU(),
        lambda: nn.ConvTranspose2d(3, 2, 2),
        (2, 3, 3),
    ),
}


def network(case: str, layers: int = 2, **options: Any) -> nn.Sequential:
    """Operator, norm, something between, operator, norm, converted; parameters unlike the initial ones."""
    first, between, second, shape = NETWORKS[case]
    torch.manual_seed(1)
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}[len(shape)]
    operators = first(), second()
    widths = [crossbn.functional.geometry_of(operator).out_channels for operator in operators]
    model = nn.Sequential(operators[0], kind(widths[0]), copy.deepcopy(between), operators[1], kind(widths[1])).double()
    with torch.no_grad():
        for place in (1, 4):
            model.get_parameter(f"{place}.weight").uniform_(0.5, 1.5)
            model.get_parameter(f"{place}.bias").uniform_(-0.5, 0.5)
    crossbn.convert_(model, **{"window": 3, "positions": None, "weights": "equal", **options})
    if layers == 2:
        assert extend_(model)["4"] == "two layers: 0 before 1, too"
    return model


def batch(case: str, size: int) -> Tensor:
    return torch.randn(size, *NETWORKS[case][3], dtype=torch.float64) + 0.3


def reference_for(model: nn.Sequential, **options: Any) -> TwoLayers:
    between = copy.deepcopy(model[2])
    if isinstance(between, nn.ReLU):
        between = nn.ReLU()  # torch.func wants no writing in place
    return TwoLayers(
        ReferenceNorm(functional_form(model[0]), 3, **options),
        DeepReferenceNorm(functional_form(model[3]), 3, **options),
        between,
    )


def twins(model: nn.Sequential) -> tuple[list[Tensor], Parameters, Parameters]:
    """Copies of all parameters, and the same in the reference's order."""
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def of(operator: int) -> Parameters:
        norm = operator + 1
        bias = copies.get(f"{operator}.bias", 0.0)
        return copies[f"{operator}.weight"], bias, copies[f"{norm}.weight"], copies[f"{norm}.bias"]

    return list(copies.values()), of(0), of(3)


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10 * max(1.0, float(want.detach().abs().max())))


def check(case: str, jump: float = 0.05, **options: Any) -> None:
    """Train a few steps and compare output and all gradients with the reference at each."""
    model = network(case, **options)
    reference = reference_for(model, **options)
    torch.manual_seed(2)
    for size in (3, 2, 4, 3, 2):
        y = batch(case, size)
        ours_in, reference_in = y.clone().requires_grad_(), y.clone().requires_grad_()
        parameters, first, second = twins(model)
        out, expected = model(ours_in), reference(reference_in, first, second)
        assert_near(out, expected)
        direction = torch.randn_like(expected)
        grads = torch.autograd.grad(out, [ours_in, *model.parameters()], direction)
        wanted = torch.autograd.grad(expected, [reference_in, *parameters], direction)
        for got, want in zip(grads, wanted, strict=True):
            assert_near(got, want)
        move_(model.parameters(), jump)


@pytest.mark.parametrize("backward", ["through", "detached"])
@pytest.mark.parametrize("case", NETWORKS)
def test_equals_brute_force(case: str, backward: str) -> None:
    check(case, backward=backward)


@pytest.mark.parametrize("invalid", ["max", "drop"])
@pytest.mark.parametrize("backward", ["through", "detached"])
def test_modes_with_invalid_entries(backward: str, invalid: str) -> None:
    # Weights that jump this far leave the polynomial's range on some channels.
    check("conv, relu", 0.7, backward=backward, invalid=invalid)


def test_a_previous_norm_that_keeps_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = crossbn.functional.Plan("patches", None)
    monkeypatch.setattr(crossbn.functional.storage, "choose_plan", lambda *_: plan)
    check("padding, stride, biases")


def error_of(layers: int, step: float) -> float:
    """How far remembered moments, moved to new weights, are from those of the old batch run through them."""
    model = network("padding, stride, biases", layers=layers, window=2)
    model[2] = nn.Tanh()  # smooth, so that there is an order
    torch.manual_seed(2)
    y = batch("padding, stride, biases", 4)
    model(y)
    with torch.no_grad():
        for weight in (model.get_parameter("0.weight"), model.get_parameter("3.weight")):
            weight.add_(torch.randn_like(weight), alpha=step)
        z = F.batch_norm(model[0](y), None, None, model[1].weight, model[1].bias, True)  # type: ignore[arg-type]
        x = F.conv2d(model[2](z), model[3].weight, None, (1, 2), (2, 1))  # type: ignore[arg-type]
    past = norm_of(model, "4").segments[0].past()
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return float((past.compensated_mean[0] - mean).norm() + (past.compensated_var[0] - var).norm())


def test_order_of_accuracy() -> None:
    """Halving the step quarters the error with both layers; with one, it is halved: the rest is not compensated."""
    steps = [0.002, 0.001, 0.0005]
    for layers, order in ((1, 2.0), (2, 4.0)):
        errors = [error_of(layers, step) for step in steps]
        ratios = [large / small for large, small in itertools.pairwise(errors)]
        assert ratios == pytest.approx([order] * 2, rel=0.1), (layers, errors)
    assert error_of(2, 0.0005) < 0.1 * error_of(1, 0.0005)


def test_unchanged_weights_are_exact() -> None:
    """Where no weight changes, nothing drifts: remembered moments stay as they were, to the last bit."""
    case = "conv, relu"
    two, one = network(case), network(case, layers=1)
    torch.manual_seed(2)
    for size in (3, 2, 4, 3):
        y = batch(case, size)
        assert torch.equal(two(y), one(y))
    past = norm_of(two, "4").segments[0].past()
    torch.testing.assert_close(past.compensated_mean, past.mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(past.compensated_var, past.var, rtol=1e-12, atol=1e-14)


def test_a_frozen_earlier_weight_needs_no_graph() -> None:
    case = "conv, relu"
    two, one = network(case), network(case, layers=1)
    torch.manual_seed(2)
    for model in (two, one):
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
    for size in (3, 2, 4):
        y, change = batch(case, size), 0.05 * torch.randn_like(two[3].weight)  # type: ignore[arg-type]
        assert torch.equal(two(y), one(y))
        with torch.no_grad():
            for model in (two, one):
                model[3].weight += change  # type: ignore[operator]


def test_gradients_of_backward_are_those_of_one_pass() -> None:
    """The passes that make the Jacobians leave nothing behind in `.grad`, nor in what the real backward adds."""
    case = "padding, stride, biases"
    model = network(case)
    torch.manual_seed(2)
    for size in (3, 2):
        model(batch(case, size))
        assert all(parameter.grad is None for parameter in model.parameters())
        move_(model.parameters())
    twin = copy.deepcopy(model)
    y = batch(case, 3)
    model(y).square().sum().backward()
    wanted = torch.autograd.grad(twin(y).square().sum(), list(twin.parameters()))
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, want, rtol=0, atol=0)


def test_three_norms() -> None:
    """Each norm reaches one operator back; the innermost passes go through norms that have done the same."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh())]
    model = nn.Sequential(*layers).double()
    crossbn.convert_(model, window=3)
    assert extend_(model) == {
        "1": "one layer: 0 reads input of the model, no norm before it",
        "4": "two layers: 0 before 1, too",
        "7": "two layers: 3 before 4, too",
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    y, losses = torch.randn(6, 4).double(), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(y)[:, 0] - y[:, 1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
