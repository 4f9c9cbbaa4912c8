"""The gradient through the compensation, added where a convolution makes its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn import functional as C
from crossbn.ops import Statistics
from crossbn.ops.autograd import WeightGradientHook
from tests.support import compiled_code


def call(dtype: torch.dtype, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    y = torch.randn(2, 3, 6, 6, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(4, 3, 3, 3, dtype=dtype).to(memory_format=layout).requires_grad_()
    return F.conv2d(y, weight), weight


def jacobian(dtype: torch.dtype) -> C.Jacobian:
    wide = C.accumulation_dtype(dtype)
    rows, of_mean, of_var = (torch.randn(shape, dtype=wide) for shape in ((2, 3, 1, 27), (2, 4), (2, 3, 4)))
    return C.Jacobian(rows, of_mean, of_var)


def statistics(of: C.Jacobian) -> Statistics:
    vector = torch.zeros(4)
    return Statistics(vector, vector, vector, C.Dependence((of,), vector, None, False, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("native", [True, False])
def test_it_is_added(dtype: torch.dtype, layout: torch.memory_format, native: bool) -> None:
    x, weight = call(dtype, layout)
    of, wide = jacobian(dtype), C.accumulation_dtype(dtype)
    a, v = torch.randn(2, 4, dtype=wide)
    (alone,) = torch.autograd.grad(x.sum(), weight, retain_graph=True)
    hook = WeightGradientHook.on(x.grad_fn)
    assert WeightGradientHook.on(x.grad_fn) is hook
    z = x * 1
    z.register_hook(lambda _: hook.deliver(statistics(of), 0, a, v))
    expected = alone.to(wide) + of.weight_gradient(a, v).reshape(4, 3, 3, 3)
    for _ in range(2):  # a second backward delivers anew
        with compiled_code(native):
            (got,) = torch.autograd.grad(z.sum(), weight, retain_graph=True)
        tolerance = {torch.bfloat16: 0.1, torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(got.to(wide), expected, rtol=tolerance, atol=tolerance)


def test_shared_statistics_are_joined() -> None:
    x, weight = call(torch.float64, torch.contiguous_format)
    of, (a, v) = jacobian(torch.float64), torch.randn(2, 4, dtype=torch.float64)
    (alone,) = torch.autograd.grad(x.sum(), weight, retain_graph=True)
    hook = WeightGradientHook.on(x.grad_fn)
    z = x * 1
    z.register_hook(lambda _: hook.deliver(statistics(of), 0, a, v))
    z.register_hook(lambda _: hook.deliver(statistics(of), 0, 2 * a, v))
    (got,) = torch.autograd.grad(z.sum(), weight)
    torch.testing.assert_close(got, alone + of.weight_gradient(3 * a, 2 * v).reshape(weight.shape))


def test_what_one_backward_leaves_does_not_reach_another() -> None:
    x, weight = call(torch.float64, torch.contiguous_format)
    (alone,) = torch.autograd.grad(x.sum(), weight, retain_graph=True)
    hook = WeightGradientHook.on(x.grad_fn)
    z = x * 1
    handle = z.register_hook(
        lambda _: hook.deliver(statistics(jacobian(torch.float64)), 0, *torch.ones(2, 4, dtype=torch.float64))
    )
    torch.autograd.grad(z.sum(), x, retain_graph=True)  # it ends before the convolution
    handle.remove()
    torch.testing.assert_close(torch.autograd.grad(z.sum(), weight)[0], alone)
