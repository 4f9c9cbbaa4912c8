"""Replacing the batch norms of a model by other norms, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from crossbn.convert import convert_
from crossbn.functional import geometry_of
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.norms import (
    BatchInstanceNorm,
    BatchRenorm,
    FrozenBatchNorm,
    KalmanNorm,
    SparseSwitchNorm,
    SwitchNorm,
    SyncBatchNorm,
    make_norm,
)
from crossbn.nn.norms.base import RankedBatchNorm, RankedNorm
from crossbn.nn.scope import Scope
from crossbn.pairing import find_pairs

_TORCH_DIMS: dict[type[nn.Module], int | None] = {
    nn.BatchNorm1d: 1,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 3,
    nn.SyncBatchNorm: None,
}
_OWN = (RankedBatchNorm, SyncBatchNorm, BatchRenorm, KalmanNorm, BatchInstanceNorm, SwitchNorm, SparseSwitchNorm)


@dataclass(frozen=True)
class SwapReport:
    """What became of the batch norms of a model; printed, it is a few lines.

    Attributes:
        norm: the name of the new norms.
        replaced: qualified names of the norms that were replaced.
        left: qualified names of those that were not, with the reason.
    """

    norm: str
    replaced: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        first = f"{len(self.replaced)} norms are {self.norm} now, {len(self.left)} left alone"
        return "\n".join([first, *(f"{name or '(root)'}: {reason}" for name, reason in self.left.items())])


def swap_norm_(
    model: nn.Module,
    name: str,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    **options: Any,
) -> SwapReport:
    """Replace every batch norm of `model` by the norm called `name`, in place.

    The new norms have the gamma and beta of the old ones (the same Parameters, so that an optimizer made before stays
    valid; copies as buffers for "frozen_bn"), their running statistics where they have any, and their eps, momentum,
    device, type and mode. What "bin", "sn" and "ssn" learn besides is new to an optimizer made before. Hooks on the old
    norms are lost.

    "cbn" and "naive_cbn" go through `convert_`, which pairs each norm with what feeds it; `options` are its options,
    and the window is 4 if neither `window` nor `batch_size` is given. "kn" is chained: each norm follows the nearest
    one before it, in the model's order, that is as wide as the input of the operator that feeds it.

    Args:
        model: any model that holds batch norms: torch's, SyncBatchNorm, cross-iteration norms, this library's others.
        name: a key of `crossbn.nn.NORMS`.
        filter_fn: called with module and qualified name; the norms for which it is false are left alone.
        example_inputs: positional arguments for one forward to watch where pairing is needed and tracing fails.
        options: of the norm, see `crossbn.nn.make_norm`; they come before what the old norm has.

    Raises:
        ValueError: for a name that is not registered, or a model that is a norm itself.
        TypeError: for an option that the norm does not have.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> print(swap_norm_(model, "gn", groups=4))
        1 norms are gn now, 0 left alone
        >>> model[1]
        GroupNorm(4, 8, eps=1e-05, affine=True, bias=True)
    """
    if name in ("cbn", "naive_cbn"):
        return _convert(model, name, filter_fn, example_inputs, options)
    make_norm(name, 1, **options)  # a wrong name or option, before anything is changed
    left: dict[str, str] = {}
    new: dict[_NormBase, nn.Module] = {}
    names: list[str] = []
    for path, norm in model.named_modules():
        if not isinstance(norm, _BatchNorm | RankedNorm):
            continue
        if reason := _why_not(norm, path, filter_fn):
            left[path] = reason
            continue
        new[norm] = _successor(norm, path, name, options)
        names.append(path)
    _replace_(model, new)
    if name == "kn":
        _chain_(model, example_inputs)
    return SwapReport(name, tuple(names), left)


def _convert(
    model: nn.Module,
    name: str,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    example_inputs: tuple[Any, ...] | None,
    options: dict[str, Any],
) -> SwapReport:
    own = [norm for norm in model.modules() if type(norm) in _OWN and not isinstance(norm, SyncBatchNorm)]
    swap_norm_(model, "bn", filter_fn=lambda norm, path: norm in own and (filter_fn is None or filter_fn(norm, path)))
    settings: dict[str, Any] = {"filter_fn": filter_fn, "example_inputs": example_inputs}
    if name == "naive_cbn":
        settings["order"] = 0
    if not options.keys() & {"window", "batch_size"}:
        settings["window"] = 4
    report = convert_(model, **settings, **options)
    left = {record.name: record.reason for record in report.left}
    return SwapReport(name, tuple(record.name for record in report.records if record.name not in left), left)


def _why_not(norm: nn.Module, path: str, filter_fn: Callable[[nn.Module, str], bool] | None) -> str:
    """Return why a norm is left alone, or nothing."""
    if filter_fn is not None and not filter_fn(norm, path):
        return "filter_fn says so"
    kind = _plain_type(norm)
    if kind not in (*_TORCH_DIMS, *_OWN):
        return f"{kind.__module__}.{kind.__qualname__} is a subclass whose behaviour might be lost"
    if not path:
        raise ValueError(f"the model is a norm itself, {norm}, which cannot be replaced in place")
    return ""


def _plain_type(norm: nn.Module) -> type[nn.Module]:
    return norm.plain_type() if isinstance(norm, CrossIterBatchNorm) else type(norm)


def _successor(norm: _NormBase, path: str, name: str, options: dict[str, Any]) -> nn.Module:
    """Return a norm called `name` with the parameters, buffers and settings of `norm`, which is at `path`."""
    dims = norm.dims if isinstance(norm, RankedNorm) else _TORCH_DIMS[_plain_type(norm)]
    like = next((t for t in (norm.weight, norm.running_mean) if t is not None), None)
    settings = {
        "eps": norm.eps,
        "momentum": norm.momentum,
        "affine": norm.affine,
        "track_running_stats": norm.track_running_stats,
        "device": None if like is None else like.device,
        "dtype": None if like is None else like.dtype,
    }
    if name == "sync_bn":
        settings["process_group"] = getattr(norm, "process_group", None)
    try:
        new = make_norm(name, norm.num_features, **{"dims": dims, **settings, **options})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _hand_over_(norm, new)
    if hasattr(new, "label"):
        new.label = path  # type: ignore[assignment]  # Module attributes are untyped
    return new.train(norm.training)


def _hand_over_(old: _NormBase, new: nn.Module) -> None:
    for key in ("weight", "bias"):
        parameter = old._parameters[key]
        if isinstance(new, FrozenBatchNorm):
            new._buffers[key] = None if parameter is None else parameter.detach().clone()
        elif old.affine and new.affine:
            new._parameters[key] = parameter
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        buffer = old._buffers[key]
        if buffer is not None and new._buffers.get(key) is not None:
            new._buffers[key] = buffer.clone() if isinstance(new, FrozenBatchNorm) else buffer


def _replace_(model: nn.Module, new: dict[_NormBase, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children has a shared one once only
            if isinstance(child, _NormBase) and child in new:
                parent._modules[name] = new[child]
    for norm in new:
        if isinstance(norm, CrossIterBatchNorm):
            norm._become_plain_()  # takes its hooks off the operators
    if not any(isinstance(module, CrossIterBatchNorm) for module in model.modules()):
        Scope.unmark_(model)


def _chain_(model: nn.Module, example_inputs: tuple[Any, ...] | None) -> None:
    """Let each Kalman norm follow the nearest one before it that can have fed its operator."""
    before: list[KalmanNorm] = []
    pairings = find_pairs(model, example_inputs)
    for path, norm in list(model.named_modules()):
        if not isinstance(norm, KalmanNorm):
            continue
        segments = pairings[path].segments
        if norm.previous is None and len(segments) == 1 and segments[0].direct:
            producer = model.get_submodule(segments[0].producers[0])
            geometry = geometry_of(producer)
            fitting = [other for other in before if other.num_features == geometry.in_channels]
            if fitting and not geometry.transposed:
                norm.follow_(fitting[-1], producer)
        before.append(norm)
