"""Norms of weights instead of features, as parametrizations of torch's.

| name | reparametrization | paper |
|---|---|---|
| "wn" | Weight Normalization: `w = g * v / |v|`, a learnt length for each output channel | Tim Salimans, Diederik Kingma, NeurIPS 2016, https://arxiv.org/abs/1602.07868 |
| "ws" | Weight Standardization: each output channel's weights have mean 0 and variance 1 | Siyuan Qiao, Huiyu Wang, Chenxi Liu, Wei Shen, Alan Yuille, 2019, https://arxiv.org/abs/1903.10520 |
"""  # noqa: E501  # a table

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrizations, parametrize

from crossbn.functional import LINEAR_OPERATORS, Geometry, flatten_weight, unflatten_weight


class WeightStandardization(nn.Module):
    """Parametrization: `(W - mean) / sqrt(var + eps)` of the weights that each output channel reads with.

    The original weight stays the same Parameter, so an optimizer made before goes on training it.

    Args:
        geometry: of the operator.
        eps: added to the variance, inside the root.
    """

    def __init__(self, geometry: Geometry, eps: float = 1e-5) -> None:
        super().__init__()
        self.geometry = geometry
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        """Standardize `weight`, of the operator's own shape."""
        rows = flatten_weight(weight, self.geometry)
        var, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
        return unflatten_weight((rows - mean) * torch.rsqrt(var + self.eps), self.geometry)


@dataclass(frozen=True)
class Reparametrization:
    """A registered reparametrization.

    Attributes:
        title: its name in full.
        paper: where it was proposed.
        applies: which operators it is for.
        register_: puts it on an operator called so.
    """

    title: str
    paper: str
    applies: Callable[[nn.Module], bool]
    register_: Callable[[nn.Module, str], None]


def _weight_geometry(module: nn.Module) -> Geometry:
    """Read off how a weight is arranged; what a subclass computes with it does not matter."""
    if isinstance(module, nn.Linear):
        return Geometry(module.out_features, module.in_features)
    assert isinstance(module, _ConvNd)
    kernel = tuple(module.kernel_size)
    return Geometry(module.out_channels, module.in_channels, module.groups, kernel, transposed=module.transposed)


def _normalize_weight_(module: nn.Module, name: str) -> None:
    geometry = _weight_geometry(module)
    if geometry.transposed and geometry.groups > 1:
        raise ValueError(
            f"{name}: the output channels of {module} are no axis of its weight, as weight_norm needs them"
        )
    parametrizations.weight_norm(module, dim=1 if geometry.transposed else 0)


def _standardize_weight_(module: nn.Module, name: str) -> None:  # noqa: ARG001  # the same signature for all
    parametrize.register_parametrization(module, "weight", WeightStandardization(_weight_geometry(module)))


def _is_operator(module: nn.Module) -> bool:
    return isinstance(module, LINEAR_OPERATORS)


def _is_wide_convolution(module: nn.Module) -> bool:
    # Of a single weight per output channel nothing would be left.
    return _is_operator(module) and not isinstance(module, nn.Linear) and _weight_geometry(module).patch_size > 1


REPARAMETRIZATIONS = {
    "wn": Reparametrization(
        "Weight Normalization", "https://arxiv.org/abs/1602.07868", _is_operator, _normalize_weight_
    ),
    "ws": Reparametrization(
        "Weight Standardization", "https://arxiv.org/abs/1903.10520", _is_wide_convolution, _standardize_weight_
    ),
}
"""Reparametrizations by the names that `reparametrize_` takes."""


def reparametrize_(model: nn.Module, name: str) -> list[str]:
    """Reparametrize the weights of `model`, in place, and return the names of the operators concerned.

    As in the papers, "wn" is for every convolution and linear layer and begins with the function that was there: the
    paper's initialization from a first batch is not made. "ws" is for every convolution that reads more than one number
    per output, the linear layers being left out; it changes the function, and is meant to be followed by norms. Norms
    are left as they are.

    "wn" has parameters of its own: make the optimizer afterwards. Operators that already have the reparametrization
    are left as they are. Parametrized models are copied with `copy.deepcopy` and saved by `state_dict`; torch does
    not pickle them.

    Args:
        model: any model.
        name: a key of `REPARAMETRIZATIONS`.

    Raises:
        ValueError: for a name that is not registered, an operator whose weight is parametrized otherwise, or "wn" of a
            transposed convolution with groups.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> reparametrize_(model, "ws")
        ['0']
        >>> bool(model[0].weight.flatten(1).mean(1).abs().max() < 1e-6)
        True
    """
    if name not in REPARAMETRIZATIONS:
        raise ValueError(f"no reparametrization is called {name!r}; there are {', '.join(REPARAMETRIZATIONS)}")
    chosen = REPARAMETRIZATIONS[name]
    done = []
    for path, module in list(model.named_modules()):
        if not chosen.applies(module):
            continue
        if parametrize.is_parametrized(module, "weight"):
            if _kind(module) != name:
                raise ValueError(f"{path}: the weight of {type(module).__name__} is parametrized otherwise already")
            continue
        chosen.register_(module, path)
        done.append(path)
    return done


def _kind(module: nn.Module) -> str | None:
    """Return the name of the one reparametrization on a weight, if it is one of ours."""
    steps = list(module.parametrizations["weight"])  # type: ignore[index]  # Module attributes are untyped
    kinds = {"_WeightNorm": "wn", WeightStandardization.__name__: "ws"}
    return kinds.get(type(steps[0]).__name__) if len(steps) == 1 else None
