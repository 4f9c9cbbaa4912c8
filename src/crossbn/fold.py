"""Inference without norms: each one folded into the operator before it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from crossbn.convert import revert_
from crossbn.functional import flatten_weight, geometry_of, unflatten_weight
from crossbn.pairing import find_pairs


@torch.no_grad()
def fold(model: nn.Module, example_inputs: tuple[Any, ...] | None = None) -> nn.Module:
    """Return a copy of `model` for inference, each norm folded into its producer.

    A norm that cannot be folded, because its producer feeds something else as well, or tracing finds none, becomes
    the plain norm again. Outputs equal those of the model in evaluation mode up to rounding.

    Args:
        model: converted or not.
        example_inputs: positional arguments for one forward to watch, for models that cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
        >>> fold(model)[1]
        Identity()
    """
    folded = copy.deepcopy(model)
    revert_(folded)
    folded.eval().requires_grad_(False)
    for name, pairing in find_pairs(folded, example_inputs).items():
        norm = folded.get_submodule(name)
        assert isinstance(norm, _BatchNorm)
        if pairing.exclusive and norm.running_mean is not None:
            _fold_into_(folded.get_submodule(pairing.segments[0].producers[0]), norm)
            _replace_(folded, norm, _what_follows(norm))
    return folded


def _fold_into_(operator: nn.Module, norm: _BatchNorm) -> None:
    geometry = geometry_of(operator)
    weight: Tensor = operator.weight  # type: ignore[assignment]  # Module attributes are untyped
    old_bias = operator.bias
    if parametrize.is_parametrized(operator):
        # Not remove_parametrizations: it takes the property off the class, which the original shares.
        operator.__class__ = type(operator).__mro__[1]
        del operator.parametrizations
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    bias = -norm.running_mean
    if isinstance(old_bias, Tensor):
        bias = bias + old_bias
    shift = bias * scale if norm.bias is None else bias * scale + norm.bias
    scaled = unflatten_weight(flatten_weight(weight, geometry) * scale.unsqueeze(1), geometry)
    operator.weight = nn.Parameter(scaled.to(weight.dtype).contiguous(), requires_grad=False)
    operator.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)


def _what_follows(norm: _BatchNorm) -> nn.Module:
    """Return what a norm does after normalizing: nothing, or timm's fused dropout and activation."""
    following = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
    following = [module for module in following if not isinstance(module, nn.Identity)]
    return nn.Sequential(*following) if following else nn.Identity()


def _replace_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
