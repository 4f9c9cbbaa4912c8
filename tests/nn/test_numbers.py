"""Numbers at the edge of their type, arguments of odd layout, and tensors of a wrong size."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import crossbn
from crossbn import nn as cnn
from crossbn import ops
from crossbn.ops.autograd import Context, normalize
from tests.reference.cross_iteration import ReferenceNorm
from tests.support import compiled_code, move_

NATIVE = pytest.mark.parametrize("native", [True, False], ids=["compiled", "torch"])
# Forward-mode derivatives make torch load scripts of its own.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def network(channels: int = 8, momentum: float = 0.1, bias: bool = False, **options: Any) -> nn.Sequential:
    conv = nn.Conv2d(3, channels, 3, bias=bias)
    with torch.no_grad():
        conv.weight.uniform_(0.5, 1.5)
    model = nn.Sequential(conv, nn.BatchNorm2d(channels, momentum=momentum))
    crossbn.convert_(model, **{"window": 4, "decay": 1.0, **options})
    return model


def pooling(**options: Any) -> nn.Sequential:
    """A norm that no operator feeds."""
    return nn.Sequential(nn.Identity(), cnn.CrossIterBatchNorm2d(3, **{"window": 4, **options}))


@pytest.mark.parametrize("make", [network, pooling])
@pytest.mark.parametrize("size", [1e18, 1e19, 2.5e19])
@pytest.mark.parametrize("options", [{}, {"order": 2}, {"positions": None}, {"burn_in": 2}], ids=str)
@NATIVE
def test_huge_batches_leave_running_statistics_finite(
    make: Callable[..., nn.Sequential], size: float, options: dict[str, Any], native: bool
) -> None:
    """Each batch has a finite mean and variance; those of two batches of opposite sign together may have none."""
    model = make(**options)
    if make is network:
        with torch.no_grad():
            model.get_parameter("0.weight").div_(27)
    with compiled_code(native):
        for sign in (1, -1, 1, -1, 1):
            model(sign * size * (1 + 0.03 * torch.randn(2, 3, 6, 6)))
            assert model.get_buffer("1.running_var").isfinite().all()
            assert model.get_buffer("1.running_mean").isfinite().all()
        for _ in range(5):
            out = model(torch.randn(2, 3, 6, 6))
    assert out.isfinite().all()
    assert all(value.isfinite().all() for value in crossbn.history_state(model).values())


@pytest.mark.parametrize(("ratio", "tolerance"), [(1e4, 1e-3), (1e6, 3e-2)])
@pytest.mark.parametrize(
    "options", [{}, {"order": 2}, {"order": 0}, {"positions": None}, {"positions": None, "order": 2}], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
@NATIVE
def test_variance_beside_a_large_mean(
    ratio: float, tolerance: float, options: dict[str, Any], bias: bool, native: bool
) -> None:
    """With weights that do not change the window is one large batch; the mean is `ratio` standard deviations."""
    model = network(momentum=1.0, bias=bias, **options)
    weight, shift = model.get_parameter("0.weight"), model.get_parameter("0.bias") if bias else None
    outputs = []
    with compiled_code(native):
        for _ in range(6):
            y = torch.randn(2, 3, 8, 8) + ratio / 5  # 27 weights around 1: mean 27, standard deviation 5.4
            outputs.append(F.conv2d(y, weight, shift).detach().double())
            model(y).sum().backward()
    together = torch.cat(outputs[-4:])
    expected = together.var((0, 2, 3))
    assert (together.mean((0, 2, 3)) / expected.sqrt()).min() > 0.5 * ratio
    torch.testing.assert_close(model.get_buffer("1.running_var").double(), expected, rtol=tolerance, atol=0)


TRANSPOSED: dict[str, Callable[[], nn.ConvTranspose2d]] = {
    "1 to 1": lambda: nn.ConvTranspose2d(1, 1, 1, stride=2, output_padding=1, dilation=2, bias=False),
    "1 to 3": lambda: nn.ConvTranspose2d(1, 3, 1, stride=2, output_padding=1, dilation=2),
    "2 to 4, groups": lambda: nn.ConvTranspose2d(2, 4, 1, stride=2, output_padding=1, dilation=2, groups=2),
    "kernel 2": lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, output_padding=1, dilation=3, padding=1, bias=False),
    "stride 1": lambda: nn.ConvTranspose2d(2, 3, 1, stride=1, output_padding=1, dilation=2, bias=False),
}


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("positions", [None, 10_000])
def test_transposed_convolution_whose_output_has_margins(name: str, order: int, positions: int | None) -> None:
    operator = TRANSPOSED[name]().double()
    model = nn.Sequential(operator, nn.BatchNorm2d(operator.out_channels)).double()
    bare = copy.deepcopy(operator)
    bare.register_parameter("bias", None)
    reference = ReferenceNorm(lambda y, w: torch.func.functional_call(bare, {"weight": w}, (y,)), window=3, order=order)
    crossbn.convert_(model, window=3, order=order, positions=positions, decay=1.0)
    for _ in range(4):
        y = torch.randn(2, operator.in_channels, 4, 4, dtype=torch.float64) + 0.3
        values = list(model.parameters())
        twins = [p.detach().clone().requires_grad_() for p in values]
        weight, *bias, gamma, beta = twins
        out = model(y)
        expected = reference(y, weight, bias[0] if bias else 0.0, gamma, beta)[0]
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        ours = torch.autograd.grad(out.sin().sum(), values)
        torch.testing.assert_close(ours, torch.autograd.grad(expected.sin().sum(), twins), rtol=1e-8, atol=1e-8)
        move_(values)


Layout = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, Layout] = {
    "dense": lambda values: values,
    "strided": lambda values: torch.stack([values, torch.full_like(values, 9)], -1)[..., 0],
    "expanded": lambda values: values[:1].expand_as(values),
    "shifted": lambda values: torch.cat([values[:1], values])[1:],
}
IMAGES: dict[str, Layout] = {
    **LAYOUTS,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "batch second": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def check_normalize(
    types: tuple[torch.dtype, ...], image: Layout, vector: Layout, output_grad: Layout, native: bool
) -> None:
    """Compare with the formulas in float64; to refuse the arguments is as good."""
    shapes = (3, 4, 5, 6), (4,), (4,), (4,), (4,)
    random = (torch.randn(s, dtype=F64).abs() + 0.5 for s in shapes)
    args = [(vector if v.ndim == 1 else image)(v.to(t)) for v, t in zip(random, types, strict=False)]
    x, mean, var, gamma, beta = values = [arg.detach().requires_grad_() for arg in args]
    share = vector(torch.linspace(0.2, 0.8, 4, dtype=types[-1]))
    gradient = output_grad(torch.randn(3, 4, 5, 6, dtype=F64).to(x.dtype))
    try:
        with compiled_code(native):
            out = normalize(x, mean, var, gamma, beta, Context(share, 1e-5))
            got = torch.autograd.grad(out, values, gradient.to(out.dtype))
    except (RuntimeError, TypeError, ValueError):
        return
    doubles = [value.detach().double().requires_grad_() for value in values]
    x, mean, var, gamma, beta, share = *(v if v.ndim > 1 else v.reshape(4, 1, 1) for v in doubles), share.double()
    normalized = (x - mean) / torch.sqrt(var + 1e-5)
    expected = list(torch.autograd.grad(normalized * gamma + beta, doubles, g := gradient.double(), retain_graph=True))
    sums = [each.mean((0, 2, 3), keepdim=True) for each in (g, g * normalized)]
    expected[0] -= share.reshape(4, 1, 1) * gamma / torch.sqrt(var + 1e-5) * (sums[0] + normalized * sums[1])
    tolerance = 1e-9 if set(types) == {F64} else 1e-3 if BF16 not in types else 0.1
    found, wanted = [out, *got], [normalized * gamma + beta, *expected]
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("vector", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, F64])
@NATIVE
def test_normalize_of_any_layout(image: str, vector: str, dtype: torch.dtype, native: bool) -> None:
    for output_grad in ("dense", "expanded", "channels last", "transposed"):
        check_normalize((dtype,) * 6, IMAGES[image], LAYOUTS[vector], IMAGES[output_grad], native)


# Of x, mean, variance, gamma, beta and share.
MIXED = [
    (F32, F64, F64, F32, F32, F64),
    (F64, F32, F32, F64, F64, F32),
    (F32, F32, F32, F64, F64, F32),
    (F32, F32, F64, F32, F32, F32),
    (F32, F32, F32, F32, F32, F64),
    (F64, F64, F64, F32, F32, F32),
    (BF16, F32, F32, F32, F32, F32),
    (BF16, F32, F32, BF16, BF16, F32),
    (BF16, BF16, BF16, BF16, BF16, BF16),
    (F32, BF16, BF16, F32, F32, F32),
]


@pytest.mark.parametrize("types", MIXED, ids=str)
@pytest.mark.parametrize("layout", ["dense", "strided", "expanded"])
@NATIVE
def test_normalize_of_mixed_types(types: tuple[torch.dtype, ...], layout: str, native: bool) -> None:
    check_normalize(types, IMAGES[layout], LAYOUTS[layout], IMAGES["dense"], native)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5, 5), (2, 3, 120, 120)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64])
@NATIVE
def test_moments_keep_their_graph(shape: tuple[int, ...], dtype: torch.dtype, native: bool) -> None:
    x, dims = torch.randn(shape, dtype=dtype).requires_grad_(), [0, *range(2, len(shape))]
    with compiled_code(native):
        mean, var = ops.moments(x)
    expected_var, expected_mean = torch.var_mean(x, dims, correction=0)
    assert mean.requires_grad
    assert var.requires_grad
    weights = torch.randn(2, 3, dtype=dtype)
    (got,) = torch.autograd.grad((mean * weights[0] + var * weights[1]).sum(), x)
    (expected,) = torch.autograd.grad((expected_mean * weights[0] + expected_var * weights[1]).sum(), x)
    torch.testing.assert_close((mean, var, got), (expected_mean, expected_var, expected))


@FORWARD_MODE
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5, 5), (2, 3, 120, 120)], ids=str)
@NATIVE
def test_moments_keep_their_tangents(shape: tuple[int, ...], native: bool) -> None:
    x, tangent, dims = torch.randn(shape), torch.randn(shape), [0, *range(2, len(shape))]
    centred = x - x.mean(dims, keepdim=True)
    expected = tangent.mean(dims), 2 * (centred * tangent).mean(dims)
    with compiled_code(native):
        by_transform = torch.func.jvp(ops.moments, (x,), (tangent,))[1]
        with forward_ad.dual_level():
            moments = ops.moments(forward_ad.make_dual(x, tangent))
            by_dual = [forward_ad.unpack_dual(each).tangent for each in moments]
    torch.testing.assert_close(tuple(by_transform), expected)
    torch.testing.assert_close(tuple(by_dual), expected)


WRONG = [
    f"{name} of {size}, after {steps}"
    for name in ("running_mean", "running_var", "weight", "bias")
    for size in (1, 3, 5, 4096)
    for steps in (0, 3)
]


def try_wrong_size(case: str) -> str:
    """Return the name of what is raised."""
    name, _, size, _, steps = case.replace(",", "").split()
    model = network(4)
    for _ in range(int(steps)):
        model(torch.randn(2, 3, 5, 5)).sum().backward()
    norm, values = model[1], torch.ones(int(size))
    setattr(norm, name, values if name.startswith("running") else nn.Parameter(values))
    try:
        model(torch.randn(2, 3, 5, 5)).sum().backward()
    except Exception as error:  # whatever it is, the parent says whether it should be
        return type(error).__name__
    return "nothing"


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What came of each case, in a process that may crash."""
    command = [sys.executable, "-m", "tests.nn.test_numbers"]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    return dict(line.split(": ") for line in result.stdout.splitlines() if ": " in line)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_size_is_an_error_and_no_crash(case: str, raised: dict[str, str]) -> None:
    assert raised.get(case, "crash") in ("RuntimeError", "ValueError")


if __name__ == "__main__":
    for case in WRONG:
        print(f"{case}: {try_wrong_size(case)}", flush=True)
