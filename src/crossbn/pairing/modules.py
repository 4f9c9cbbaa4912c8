"""What modules mean to pairing: norms, linear operators, and modules that are looked at from outside only."""

from __future__ import annotations

import re
from typing import TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from crossbn.functional import is_linear_operator

LinearOperator: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear
)

_CHANNELWISE_FAMILIES = {"activation", "dropout", "padding", "pooling", "upsampling"}
"""Files of torch.nn.modules whose modules keep the number of channels, but for the two below."""

_NOT_CHANNELWISE = (nn.GLU, nn.MultiheadAttention)


def is_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether the module is one of the batch norms to be paired."""
    return isinstance(module, _BatchNorm)


def holds_norm(module: nn.Module) -> bool:
    """Whether the module is a batch norm or has one inside."""
    return any(is_norm(inner) for inner in module.modules())


def is_operator(module: nn.Module) -> TypeGuard[LinearOperator]:
    """Whether the module's output is that of a linear operator with the weights and padding it shows.

    A subclass with a norm inside or with a forward of its own may return something else, and is not one.
    """
    return is_linear_operator(module) and not holds_norm(module)


def is_leaf(module: nn.Module) -> bool:
    """Whether calls inside the module are of no interest: it counts as one step."""
    if is_norm(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    if isinstance(module, LinearOperator):
        return not holds_norm(module)
    built_in = type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))
    return built_in and not isinstance(module, nn.Sequential) and not holds_norm(module)


def is_dropout(module: nn.Module) -> bool:
    """Whether the module is one of torch's dropouts."""
    return isinstance(module, _DropoutNd)


def passes_through(module: nn.Module) -> bool:
    """Whether the module returns its input as it is."""
    if isinstance(module, _DropoutNd):
        return module.p == 0 or not module.training
    return isinstance(module, nn.Identity)


def output_channels(operator: LinearOperator) -> int:
    """Width of a linear operator's output."""
    return operator.out_features if isinstance(operator, nn.Linear) else operator.out_channels


def output_dimensions(operator: LinearOperator) -> int:
    """How many dimensions a linear operator's output has when its channels are dimension 1."""
    # Not weight.ndim: reading a parametrized weight computes it, which may move the parametrization's state.
    return 2 if isinstance(operator, nn.Linear) else 2 + len(operator.kernel_size)


def views(module: nn.Module) -> bool:
    """Whether the output shares the input's memory in another shape."""
    return isinstance(module, nn.Flatten | nn.Unflatten)


def keeps_channels(module: nn.Module) -> bool:
    """Whether the output is known to have as many channels as the input."""
    package, _, family = type(module).__module__.rpartition(".")
    return (
        package == "torch.nn.modules" and family in _CHANNELWISE_FAMILIES and not isinstance(module, _NOT_CHANNELWISE)
    )


def step_name(module: nn.Module) -> str:
    """The module's type in the spelling of torch's functions: MaxPool2d is max_pool2d, LeakyReLU leaky_relu."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", type(module).__name__).lower()
