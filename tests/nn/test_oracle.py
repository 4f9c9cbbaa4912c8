"""The layer against the slow reference: every operator, several optimizer steps, changing batch sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbn import functional as C
from crossbn import nn as cnn
from crossbn.functional import geometry_of
from crossbn.ops import cpu
from tests.reference.cross_iteration import ReferenceNorm
from tests.support import functional_form, move_

Case = tuple[Callable[[], nn.Module], tuple[int, ...]]

OPERATORS: dict[str, Case] = {
    "linear": (lambda: nn.Linear(5, 4, bias=False), (5,)),
    "linear bias": (lambda: nn.Linear(5, 4), (5,)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, bias=False), (3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, bias=False), (3, 6, 5)),
    "conv2d 1x1 bias": (lambda: nn.Conv2d(3, 4, 1), (3, 4, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1), padding=(1, 0, 1)), (2, 4, 5, 3)),
    "stride and padding": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), (3, 7, 6)),
    "uneven everything": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)), (3, 8, 7)),
    # An even kernel pads unevenly; torch warns that this costs a copy.
    "same": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (3, 7, 6)),
    "valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), (3, 7, 6)),
    "reflect": (lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), (3, 5, 6)),
    "replicate": (lambda: nn.Conv2d(3, 4, 3, padding=2, stride=2, padding_mode="replicate"), (3, 5, 6)),
    "circular": (lambda: nn.Conv1d(3, 4, 4, padding="same", padding_mode="circular"), (3, 7)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), (4, 5, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), (3, 5)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, dilation=2, bias=False),
        (3, 4, 3),
    ),
    "transposed groups": (lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(3, 1), groups=2), (4, 3, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 2, stride=(1, 2, 1)), (2, 2, 3, 2)),
}


def norm_for(module: nn.Module, dims: int, **options: Any) -> cnn.CrossIterBatchNorm:
    kinds = [
        cnn.CrossIterBatchNorm1d,
        cnn.CrossIterBatchNorm1d,
        cnn.CrossIterBatchNorm2d,
        cnn.CrossIterBatchNorm3d,
    ]
    norm = kinds[dims](geometry_of(module).out_channels, **{"weights": "equal", **options})  # as the reference has
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
    return norm.attach_(module)


def assert_near(got: Tensor | None, want: Tensor, dtype: torch.dtype) -> None:
    """Compare as closely as the type allows; the absolute part is relative to the largest value."""
    relative, absolute = (1e-9, 1e-11) if dtype == torch.float64 else (1e-4, 1e-4)
    assert got is not None
    torch.testing.assert_close(
        got.double(), want, rtol=relative, atol=absolute * max(1.0, float(want.detach().abs().max()))
    )


def check(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    jump: float = 0.05,
    direct: bool = False,
    **options: Any,
) -> None:
    """Train a few steps and compare output, gradients and running statistics with the reference at each."""
    torch.manual_seed(0)
    norm = norm_for(module, len(shape) - 1, window=3, positions=None, **options).to(dtype)
    if direct:  # what pairing finds out: nothing is added to the operator's output
        norm.segments[0].direct = True
        norm.configure_(norm.settings)
    module.to(dtype)
    parameters: list[Tensor] = [*module.parameters(), *norm.parameters()]
    reference = ReferenceNorm(functional_form(module), window=3, **options)
    channels = norm.num_features
    running_mean, running_var = torch.zeros(channels).double(), torch.ones(channels).double()
    for batch in (2, 3, 2, 1, 4):
        y = torch.randn(batch, *shape, dtype=torch.float64) + 0.3
        ours_in = y.to(dtype).clone().requires_grad_()
        reference_in = y.to(dtype).double().clone().requires_grad_()
        twins = [p.detach().double().clone().requires_grad_() for p in parameters]
        weight, *rest = twins
        bias = rest.pop(0) if len(rest) == 3 else 0.0
        out = norm(module(ours_in))
        expected, mean, var, count = reference(reference_in, weight, bias, *rest)
        assert_near(out, expected, dtype)
        output_grad = torch.randn_like(expected).to(dtype)
        grads = torch.autograd.grad(out, [ours_in, *parameters], output_grad)
        wanted = torch.autograd.grad(expected, [reference_in, *twins], output_grad.double())
        for got, want in zip(grads, wanted, strict=True):
            assert_near(got, want, dtype)
        running_mean = 0.9 * running_mean + 0.1 * mean
        running_var = 0.9 * running_var + 0.1 * var * count / (count - 1)
        assert_near(norm.running_mean, running_mean, dtype)
        assert_near(norm.running_var, running_var, dtype)
        move_(parameters, jump)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_equals_reference(name: str, order: int) -> None:
    make, shape = OPERATORS[name]
    torch.manual_seed(1)
    check(make(), shape, torch.float64, order=order)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_reference_in_float32(name: str) -> None:
    make, shape = OPERATORS[name]
    torch.manual_seed(1)
    check(make(), shape, torch.float32)


@pytest.mark.parametrize("backward", ["through", "detached"])
@pytest.mark.parametrize("invalid", ["max", "drop"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_modes_with_invalid_entries(backward: str, invalid: str, order: int) -> None:
    # Weights that jump this far leave the polynomial's range on some channels.
    torch.manual_seed(1)
    check(nn.Conv2d(3, 4, 3), (3, 6, 5), torch.float64, jump=1.0, order=order, backward=backward, invalid=invalid)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("plan", [C.Plan("patches", None), C.Plan("patches", 999), C.Plan("gradient", 999)])
def test_every_storage_equals_the_reference(name: str, plan: C.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered patches instead of a weight gradient, and patches instead of a gradient, of all positions."""
    monkeypatch.setattr("crossbn.functional.storage.choose_plan", lambda *_: plan)
    make, shape = OPERATORS[name]
    torch.manual_seed(1)
    check(make(), shape, torch.float64)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("storage", ["patches", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("jump", [0.05, 1.0])
def test_compiled_code_equals_the_reference(
    name: str, storage: Any, dtype: torch.dtype, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual case: nothing added to the operator's output, no bias, samples; here, of all positions."""
    if dtype == torch.float32 and jump == 1.0:
        jump = 0.5
    monkeypatch.setattr("crossbn.functional.storage.choose_plan", lambda *_: C.Plan(storage, 999))
    used = 0
    step = cpu.step

    def count(*args: Any) -> Any:
        nonlocal used
        found = step(*args)
        used += found is not None
        return found

    monkeypatch.setattr(cpu, "step", count)
    make, shape = OPERATORS[name]
    torch.manual_seed(1)
    module = make()
    module.register_parameter("bias", None)
    check(module, shape, dtype, jump, direct=True)
    assert used == 5  # at all steps
