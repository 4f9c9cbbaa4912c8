"""Inference without norms: each one folded into the operator before it."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from crossbn.convert import check_module, cross_iteration_norms, revert_
from crossbn.functional import LINEAR_OPERATORS, is_linear_operator
from crossbn.pairing import find_pairs
from crossbn.swap import replace_modules_
from crossbn.torch_internals import BatchNormBase


@torch.no_grad()
def fold(model: nn.Module, example_inputs: tuple[Any, ...] | None = None) -> nn.Module:
    """Return a copy of `model` for inference, each norm folded into its producer.

    A norm that cannot be folded, because its producer feeds something else as well, or tracing finds none, becomes
    the plain norm again. Outputs equal those of the model in evaluation mode up to rounding. Operators with a forward
    of their own are folded into if a training forward has shown that they are linear.

    Args:
        model: converted or not.
        example_inputs: positional arguments for one forward to watch, for models that cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
        >>> fold(model)[1]
        Identity()
    """
    check_module("fold", model)
    seen = _operators_seen(model)
    folded = copy.deepcopy(model)
    revert_(folded)
    folded.eval().requires_grad_(False)
    operators = [folded.get_submodule(name) for name in seen]
    for name, pairing in find_pairs(folded, example_inputs, operators, in_training=False).items():
        norm = folded.get_submodule(name)
        assert isinstance(norm, BatchNormBase)
        if pairing.exclusive and norm.running_mean is not None:
            operator = folded.get_submodule(pairing.segments[0].producers[0])
            if is_linear_operator(operator) or _stays_itself(operator, norm):
                _fold_into_(operator, norm)
                replace_modules_(folded, {norm: _what_follows(norm)})
    return folded


def _operators_seen(model: nn.Module) -> list[str]:
    """Return the modules with a forward of their own whose call, as the graph has shown, is what a norm reads."""
    owners = {
        id(module._parameters.get("weight")): name
        for name, module in model.named_modules()
        if isinstance(module, LINEAR_OPERATORS) and not is_linear_operator(module)
    }
    segments = [segment for norm in cross_iteration_norms(model).values() for segment in norm.segments]
    leaves = [each.operators[0].parameter for each in segments if each.direct and len(each.operators) == 1]
    return [owners[id(leaf)] for leaf in leaves if leaf is not None and id(leaf) in owners]


def _stays_itself(operator: nn.Module, norm: BatchNormBase) -> bool:
    """Try on a random input whether the operator, folded into, does what operator and norm do."""
    weight: Tensor = operator.weight  # type: ignore[assignment]  # Module attributes are untyped
    trial = copy.deepcopy(operator)
    spatial = [] if isinstance(operator, nn.Linear) else [2 * size + 3 for size in weight.shape[2:]]
    channels = operator.in_features if isinstance(operator, nn.Linear) else operator.in_channels
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(2, int(channels), *spatial, generator=generator).to(weight)  # type: ignore[arg-type]  # untyped
    running = norm.running_mean, norm.running_var
    expected = F.batch_norm(operator(y), *running, norm.weight, norm.bias, eps=norm.eps)
    _fold_into_(trial, norm)
    return torch.allclose(trial(y), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def _fold_into_(operator: nn.Module, norm: BatchNormBase) -> None:
    weight: Tensor = operator.weight  # type: ignore[assignment]  # Module attributes are untyped
    old_bias = operator.bias
    if parametrize.is_parametrized(operator):
        # Not remove_parametrizations: it takes the property off the class, which the original shares.
        operator.__class__ = type(operator).__mro__[1]
        del operator.parametrizations
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps) * (1 if norm.weight is None else norm.weight)
    shift = ((old_bias if isinstance(old_bias, Tensor) else 0) - norm.running_mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    scaled = weight * _along_outputs(scale, operator, weight)
    operator.weight = nn.Parameter(scaled.to(weight.dtype).contiguous(), requires_grad=False)
    operator.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)


def _along_outputs(scale: Tensor, operator: nn.Module, weight: Tensor) -> Tensor:
    """Shape per-channel values to multiply a weight [C, ...], or [C_in, C/groups, ...] of a transposed convolution."""
    ones = [1] * (weight.ndim - 2)
    if not getattr(operator, "transposed", False):
        return scale.reshape(-1, 1, *ones)
    groups = int(operator.groups)  # type: ignore[arg-type]  # Module attributes are untyped
    return scale.reshape(groups, 1, -1).expand(-1, len(weight) // groups, -1).reshape(len(weight), -1, *ones)


def _what_follows(norm: BatchNormBase) -> nn.Module:
    """Return what a norm does after normalizing: nothing, or timm's fused dropout and activation."""
    following = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
    following = [module for module in following if not isinstance(module, nn.Identity)]
    return nn.Sequential(*following) if following else nn.Identity()
