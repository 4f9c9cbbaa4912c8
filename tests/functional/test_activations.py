"""Activations read from the graph: the function and its slope are those of autograd."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn.functional import Activation

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "celu": lambda z: F.celu(z, 2.0),
    "elu": lambda z: F.elu(z, 0.7),
    "elu in place": lambda z: F.elu(z, 0.7, inplace=True),
    "gelu": F.gelu,
    "gelu tanh": lambda z: F.gelu(z, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda z: F.hardtanh(z, -0.5, 0.8),
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "leaky_relu in place": lambda z: F.leaky_relu(z, 0.2, inplace=True),
    "mish": F.mish,
    "relu": F.relu,
    "relu in place": lambda z: F.relu(z, inplace=True),
    "relu6": lambda z: F.relu6(5 * z),
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "silu in place": lambda z: F.silu(z, inplace=True),
    "softplus": lambda z: F.softplus(z, 2.0, 3.0),
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_and_slope_are_autograds(name: str) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    z = 2 * torch.randn(50, dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    x = function(leaf * 1)
    found = Activation.of_node(x.grad_fn)
    assert found is not None
    scaled = 5 * z if name == "relu6" else z  # the node is of the last function
    (expected,) = torch.autograd.grad(x.sum(), leaf)
    torch.testing.assert_close(found(scaled), x.detach())
    torch.testing.assert_close(found.slope(scaled) * (5 if name == "relu6" else 1), expected)


def test_other_nodes_are_no_activations() -> None:
    z = torch.randn(3, requires_grad=True)
    assert [Activation.of_node(x.grad_fn) for x in (z + 1, z.softmax(0), z.clone(), F.dropout(z, 0.5))] == [None] * 4


def test_names_are_torchs() -> None:
    z = torch.randn(3, requires_grad=True)
    names = [Activation.of_node(x.grad_fn).name for x in (F.leaky_relu(z), F.gelu(z), F.relu6(z))]  # type: ignore[union-attr]
    assert names == ["leaky_relu", "gelu", "hardtanh"]
