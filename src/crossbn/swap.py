"""Replacing the batch norms of a model by other norms, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from crossbn.convert import check_module, check_options, convert_, cross_iteration_norms, revert_
from crossbn.functional import geometry_of
from crossbn.nn import CrossIterBatchNorm, KalmanNorm, SyncBatchNorm
from crossbn.nn.norms.base import RankedNorm
from crossbn.nn.norms.registry import find_norm
from crossbn.nn.norms.successor import make_successor
from crossbn.pairing import find_pairs
from crossbn.torch_internals import BatchNormBase

Filter: TypeAlias = Callable[[nn.Module, str], bool]

_TORCH_DIMS: dict[Any, int | None] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3, nn.SyncBatchNorm: None}


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
    filter_fn: Filter | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    **options: Any,
) -> SwapReport:
    """Replace every batch norm of `model` by the norm called `name`, in place.

    The new norms have the gamma and beta of the old ones (the same Parameters, so that an optimizer made before stays
    valid; copies as buffers for "frozen_bn"), their running statistics where they have any, and their eps, momentum,
    device, type and mode. What "bin", "sn" and "ssn" learn besides is new to an optimizer made before. Hooks on the old
    norms are lost. "kn" is chained: each norm follows the nearest one before it, in the model's order, that is as wide
    as the input of the operator that feeds it; where it runs first it is BatchNorm. "cbn" and "naive_cbn" go through
    `convert_`; `options` are its options, and the window is 4 if neither `window` nor `batch_size` is given.

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
        return _convert_(model, name, filter_fn, example_inputs=example_inputs, **options)
    check_module("swap_norm_", model)
    find_norm(name).check_options(options)
    norms = {path: norm for path, norm in model.named_modules() if isinstance(norm, BatchNormBase | RankedNorm)}
    left = {path: reason for path, norm in norms.items() if (reason := _why_not(norm, path, filter_fn))}
    chosen = {path: norm for path, norm in norms.items() if path not in left}
    new = {norm: make_successor(norm, name, _dims(norm), path, options) for path, norm in chosen.items()}
    replace_modules_(model, new)
    revert_(nn.ModuleList(new))  # This takes their hooks off the operators.
    if not cross_iteration_norms(model):
        revert_(model)  # This takes off what the conversion had put on the model itself.
    if name == "kn":
        _chain_(model, example_inputs)
    return SwapReport(name, tuple(chosen), left)


def _convert_(model: nn.Module, name: str, filter_fn: Filter | None, **options: Any) -> SwapReport:
    settings: dict[str, Any] = {"order": 0} if name == "naive_cbn" else {}
    if not options.keys() & {"window", "batch_size", "config"}:
        settings["window"] = 4
    check_module("swap_norm_", model)
    check_options(**settings, **options)  # before anything is changed
    own = [norm for norm in model.modules() if _is_own(type(norm)) and not isinstance(norm, SyncBatchNorm)]
    swap_norm_(model, "bn", filter_fn=lambda norm, path: norm in own and (filter_fn is None or filter_fn(norm, path)))
    report = convert_(model, filter_fn=filter_fn, **settings, **options)
    left = {record.name: record.reason for record in report.left}
    return SwapReport(name, tuple(record.name for record in report.records if record.name not in left), left)


def _why_not(norm: nn.Module, path: str, filter_fn: Filter | None) -> str:
    """Return why a norm is left alone, or nothing."""
    if filter_fn is not None and not filter_fn(norm, path):
        return "filter_fn says so"
    kind = _plain_type(norm)
    if kind not in _TORCH_DIMS and not _is_own(kind):
        return f"{kind.__module__}.{kind.__qualname__} is a subclass whose behaviour might be lost"
    if not path:
        raise ValueError(f"the model is a norm itself, {norm}, which cannot be replaced in place")
    return ""


def _plain_type(norm: nn.Module) -> type[nn.Module]:
    return norm.plain_type() if isinstance(norm, CrossIterBatchNorm) else type(norm)


def _dims(norm: nn.Module) -> int | None:
    return norm.dims if isinstance(norm, RankedNorm) else _TORCH_DIMS[_plain_type(norm)]


def _is_own(kind: type[nn.Module]) -> bool:
    """Tell whether a type is one of this library's norms, not a subclass of somebody else's."""
    return issubclass(kind, RankedNorm) and kind.__module__.startswith("crossbn.nn.norms.")


def replace_modules_(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    """Put new modules in the places of old ones, under all their names."""
    for parent in list(model.modules()):
        parent._modules.update({name: new[child] for name, child in parent._modules.items() if child in new})


def _chain_(model: nn.Module, example_inputs: tuple[Any, ...] | None) -> None:
    """Let each Kalman norm follow the nearest one before it that can have fed its operator."""
    before: list[KalmanNorm] = []
    for path, pairing in find_pairs(model, example_inputs).items():
        norm = model.get_submodule(path)
        if not isinstance(norm, KalmanNorm):
            continue
        if norm.previous is None and len(pairing.segments) == 1 and pairing.segments[0].direct:
            producer = model.get_submodule(pairing.producers[0])
            geometry = geometry_of(producer)
            fitting = [other for other in before if other.num_features == geometry.in_channels]
            if fitting and not geometry.transposed:
                norm.follow_(fitting[-1], producer)
        before.append(norm)
    if before and _forget_estimates not in model._forward_hooks.values():
        model.register_forward_hook(_forget_estimates, always_call=True)


def _forget_estimates(model: nn.Module, *_: object) -> None:
    """Leave nothing to the next forward: a norm may run before the one that it follows, as in a feature pyramid."""
    for norm in model.modules():
        if isinstance(norm, KalmanNorm):
            norm._estimate = None
