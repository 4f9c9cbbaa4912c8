"""Turning the batch norms of a model into cross-iteration norms, in place, and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from crossbn.conversion_report import COMPENSATED, LEFT, PENDING, POOLED, ConversionReport, NormRecord
from crossbn.functional import Settings, geometry_of, is_linear_operator
from crossbn.nn.feeds import make_feed
from crossbn.nn.layer import (
    CrossIterBatchNorm,
    CrossIterBatchNorm1d,
    CrossIterBatchNorm2d,
    CrossIterBatchNorm3d,
    CrossIterBatchNormAct2d,
)
from crossbn.nn.producer import Operator, Producer
from crossbn.nn.scope import Scope
from crossbn.nn.segment import Segment
from crossbn.pairing import Pairing, find_pairs
from crossbn.pairing import Segment as PairedSegment
from crossbn.schedules import window_for
from crossbn.torch_internals import BatchNormBase

GIVEN = "given in pairs"

_CONVERTED: dict[str, type[CrossIterBatchNorm]] = {
    "torch.nn.modules.batchnorm.BatchNorm1d": CrossIterBatchNorm1d,
    "torch.nn.modules.batchnorm.BatchNorm2d": CrossIterBatchNorm2d,
    "torch.nn.modules.batchnorm.BatchNorm3d": CrossIterBatchNorm3d,
    "torch.nn.modules.batchnorm.SyncBatchNorm": CrossIterBatchNorm,
    "timm.layers.norm_act.BatchNormAct2d": CrossIterBatchNormAct2d,
}


def convert_(
    model: nn.Module,
    *,
    window: int | None = None,
    batch_size: int | None = None,
    unpaired: str = "bn",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    pairs: Mapping[str, str | Sequence[str]] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    config: Settings | None = None,
    **options: Any,
) -> ConversionReport:
    """Turn every batch norm of `model` into a cross-iteration norm, in place.

    Parameters, buffers and `state_dict` keys stay what and where they are, so an optimizer made before goes on
    training them. Converting again changes the settings and nothing else.

    A norm that no linear operator feeds stays BatchNorm: pooling without compensation is worse than that. Operators
    that cannot be named without running the model are read from the graph at the first training forward, and the
    report is completed.

    Args:
        model: any model.
        window: steps to pool; give this or `batch_size`.
        batch_size: examples per step, for the paper's window, `window_for(batch_size)`.
        unpaired: what becomes of a norm that no linear operator feeds: "bn" (left alone), "pool" or "error".
        filter_fn: called with module and qualified name; the norms for which it is false are left alone.
        pairs: producers of norms by qualified name, where the model's graph does not tell or is not to be believed.
        example_inputs: positional arguments for one forward to watch, for models that cannot be traced.
        config: all settings as one object, instead of `window` and the options.
        options: burn_in, order, positions, backward, sync and the others of `nn.Settings`; `weights="auto"` measures
            while training how much each remembered step is worth.

    Raises:
        TypeError: for an option that does not exist, or both options and `config`.
        ValueError: for both or neither of `window` and `batch_size`, a setting out of range, a name in `pairs` that
            the model does not have, a lazy module without a shape, or an unpaired norm with `unpaired="error"`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> print(convert_(model, batch_size=4).summary())
        1 norms: 1 compensated, 0 pooled, 0 left alone
    """
    if config is None or window is not None or batch_size is not None:
        options["window"] = _choose_window(window, batch_size)
    settings = Settings.of(config, options)
    if unpaired not in ("pool", "bn", "error"):
        raise ValueError(f"unpaired must be one of 'pool', 'bn', 'error', got {unpaired!r}")
    pairings = {**find_pairs(model, example_inputs), **_given_pairs(model, pairs or {})}
    plan = {name: _decide(model, pairing, settings.order, unpaired, filter_fn) for name, pairing in pairings.items()}
    segments_of = _Segments(model, unpaired)
    for name, record in plan.items():
        if record.status != LEFT:
            found = () if record.status == PENDING else pairings[name].segments
            _convert_norm_(model.get_submodule(name), name, found, settings, segments_of)
    report = ConversionReport(plan.values(), model)
    Scope.mark_(model, report.complete if report.pending else None)
    return report


def revert_(model: nn.Module) -> None:
    """Turn every cross-iteration norm of `model` into the plain norm again, with the same parameters."""
    for norm in cross_iteration_norms(model).values():
        norm._become_plain_()
    Scope.unmark_(model)


def set_window_(model: nn.Module, window: int) -> None:
    """Change the window of every cross-iteration norm now; the latest steps that fit are kept.

    Raises:
        ValueError: if the model has no such norm, or the window is below 1.
    """
    norms = cross_iteration_norms(model)
    if not norms:
        raise ValueError("set_window_ needs a converted model, this one has no cross-iteration norm")
    for norm in norms.values():
        norm.configure_(replace(norm.settings, window=window))


def cross_iteration_norms(model: nn.Module) -> dict[str, CrossIterBatchNorm]:
    """Return the cross-iteration norms of `model` by qualified name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CrossIterBatchNorm)}


def _choose_window(window: int | None, batch_size: int | None) -> int:
    if (window is None) == (batch_size is None):
        raise ValueError(f"give exactly one of window and batch_size, got {window!r} and {batch_size!r}")
    return window_for(batch_size) if batch_size is not None else window  # type: ignore[return-value]  # checked


def _given_pairs(model: nn.Module, pairs: Mapping[str, str | Sequence[str]]) -> dict[str, Pairing]:
    if not isinstance(pairs, Mapping):
        raise TypeError(f"pairs must map names of norms to names of producers, got {pairs!r}")
    modules = dict(model.named_modules())
    given = {}
    for name, value in pairs.items():
        producers = (value,) if isinstance(value, str) else tuple(value)
        norm = modules.get(name)
        if not isinstance(norm, BatchNormBase):
            raise ValueError(f"pairs names the norm {name!r}, which the model does not have")
        for producer in producers:
            operator = modules.get(producer)
            if operator is None or not is_linear_operator(operator):
                raise ValueError(f"pairs names the producer {producer!r} of {name}, which is no operator of the model")
            channels = geometry_of(operator).out_channels
            if channels != norm.num_features:
                raise ValueError(f"{name} has {norm.num_features} channels and its producer {producer} {channels}")
        # Not direct: two norms that are given the same producer may read different calls of it.
        segment = PairedSegment(norm.num_features, producers, False, GIVEN)
        given[name] = Pairing(name, (segment,), exclusive=False)
    return given


def _decide(
    model: nn.Module,
    pairing: Pairing,
    order: int,
    unpaired: str,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> NormRecord:
    norm, name = model.get_submodule(pairing.name), pairing.name
    producers = tuple(dict.fromkeys(p for segment in pairing.segments for p in segment.producers))
    if filter_fn is not None and not filter_fn(norm, name):
        return NormRecord(name, LEFT, producers, "filter_fn says so", asked=True)
    if not isinstance(norm, CrossIterBatchNorm) and _type_name(norm) not in _CONVERTED:
        reason = f"{_type_name(norm)} is a subclass whose behaviour might be lost"
        return NormRecord(name, LEFT, producers, reason)
    if order == 0:
        return NormRecord(name, POOLED, producers, "order 0 compensates nothing")
    if producers:
        if not all(segment.final for segment in pairing.segments):
            return NormRecord(name, PENDING, (), "partly " + _reasons(pairing))
        lacking = [f"{s.channels} channels {s.reason}" for s in pairing.segments if not s.producers]
        what = "pooled only" if unpaired == "pool" else "not pooled"
        reason = f"{what}: {'; '.join(lacking)}" if lacking else _describe(pairing)
        return NormRecord(name, COMPENSATED, producers, reason)
    if not all(segment.final for segment in pairing.segments):
        return NormRecord(name, PENDING, (), _reasons(pairing))
    if unpaired == "error":
        raise ValueError(f"no linear operator feeds {name or 'the model'}: {_reasons(pairing)}")
    return NormRecord(name, POOLED if unpaired == "pool" else LEFT, (), _reasons(pairing))


def _reasons(pairing: Pairing) -> str:
    return "; ".join(dict.fromkeys(segment.reason for segment in pairing.segments))


def _describe(pairing: Pairing) -> str:
    if len(pairing.segments) > 1:
        return f"concatenation of {len(pairing.segments)}"
    return "direct" if pairing.segments[0].direct else pairing.segments[0].reason


class _Segments:
    """The producers and shared segments of one conversion: an operator is watched once, whomever it feeds."""

    def __init__(self, model: nn.Module, unpaired: str) -> None:
        self._model = model
        self.unpaired = unpaired
        self._producers: dict[str, Producer] = {}
        self._shared: dict[tuple[str, Settings], Segment] = {}

    def modules(self, found: PairedSegment) -> list[nn.Module]:
        return [self._model.get_submodule(name) for name in found.producers]

    def make(self, found: PairedSegment, settings: Settings, like: Tensor) -> Segment:
        if not found.direct:
            return self._new(found, settings, like)
        key = (found.producers[0], settings)
        if key not in self._shared:
            self._shared[key] = self._new(found, settings, like)
        return self._shared[key]

    def _new(self, found: PairedSegment, settings: Settings, like: Tensor) -> Segment:
        given = found.reason == GIVEN
        for name, module in zip(found.producers, self.modules(found), strict=True):
            if name not in self._producers:
                self._producers[name] = Producer(module)
            self._producers[name].always |= given
        operators = [Operator.of_producer(self._producers[name]) for name in found.producers]
        pooled = bool(operators) or self.unpaired == "pool" or settings.order == 0
        return Segment(found.channels, operators, settings, like, found.direct, given, pooled)


def _convert_norm_(
    norm: nn.Module, name: str, found: Sequence[PairedSegment], settings: Settings, segments_of: _Segments
) -> None:
    fresh = not isinstance(norm, CrossIterBatchNorm)
    if fresh:
        norm.__class__ = _CONVERTED[_type_name(norm)]
    assert isinstance(norm, CrossIterBatchNorm)
    if norm.plain_type() is nn.SyncBatchNorm:
        group = settings.process_group or getattr(norm, "process_group", None)
        settings = replace(settings, sync=True, process_group=group)
    if fresh:
        norm._become_cross_iteration_(settings, name)
    norm.feeds.unpaired = segments_of.unpaired
    wanted = [(each.channels, segments_of.modules(each)) for each in found]
    if not fresh and (not found or wanted == [(s.channels, [p.module for p in s.producers]) for s in norm.segments]):
        norm.configure_(settings)
        return
    norm.settings = norm.feeds.settings = settings
    norm.feeds.set_main_(make_feed([segments_of.make(each, settings, norm.feeds.like()) for each in found]))


def _type_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
