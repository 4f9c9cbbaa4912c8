"""Turning the batch norms of a model into cross-iteration norms, in place, and back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from crossbn.conversion_report import LEFT, PENDING, ConversionReport, NormRecord
from crossbn.functional import Settings, geometry_of, is_linear_operator
from crossbn.messages import say
from crossbn.nn import layer
from crossbn.nn.batch_norm import has_seen_something
from crossbn.nn.layer import CrossIterBatchNorm
from crossbn.nn.producer import Operator, Producer
from crossbn.nn.scope import Scope
from crossbn.nn.segment import Segment
from crossbn.pairing import Pairing, find_pairs
from crossbn.pairing import Segment as PairedSegment
from crossbn.schedules import window_for
from crossbn.torch_internals import BatchNormBase

_GIVEN = "given in pairs"
_FORGETS = (
    "The running statistics are of a training and are not used in training steps: to fine-tune, "
    'prior="running" begins with them'
)

_CONVERTED: dict[str, type[CrossIterBatchNorm]] = {
    "torch.nn.modules.batchnorm.BatchNorm1d": layer.CrossIterBatchNorm1d,
    "torch.nn.modules.batchnorm.BatchNorm2d": layer.CrossIterBatchNorm2d,
    "torch.nn.modules.batchnorm.BatchNorm3d": layer.CrossIterBatchNorm3d,
    "torch.nn.modules.batchnorm.SyncBatchNorm": CrossIterBatchNorm,
    "timm.layers.norm_act.BatchNormAct2d": layer.CrossIterBatchNormAct2d,
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
        options: burn_in, order, positions, backward, sync and the others of `nn.Settings`: `weights="auto"`, the
            default, measures while training how much a remembered step is worth, "equal" is the paper's, `decay` a
            fixed rate; `compensate_through="activations"` looks through elementwise activations; `prior="running"`,
            for fine-tuning, begins with the running statistics of the checkpoint; `consistent=True`
            with `order=2` moves remembered steps to today's statistics of the norms before.

    Raises:
        TypeError: for an option that does not exist, or both options and `config`.
        ValueError: for both or neither of `window` and `batch_size`, a setting out of range, a name in `pairs` that
            the model does not have, a lazy module without a shape, or an unpaired norm with `unpaired="error"`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> print(convert_(model, batch_size=4).summary())
        1 norms: 1 compensated, 0 pooled, 0 left alone
    """
    check_module("convert_", model)
    settings = check_options(window=window, batch_size=batch_size, unpaired=unpaired, config=config, **options)
    pairings = find_pairs(model, example_inputs) | _given_pairs(model, pairs or {})
    records = []
    for name, pairing in pairings.items():
        norm = model.get_submodule(name)
        if filter_fn is not None and not filter_fn(norm, name):
            records.append(NormRecord(name, LEFT, pairing.producers, "filter_fn says so", asked=True))
        elif not isinstance(norm, CrossIterBatchNorm) and _type_name(norm) not in _CONVERTED:
            reason = f"{_type_name(norm)} is a subclass whose behaviour might be lost"
            records.append(NormRecord(name, LEFT, pairing.producers, reason))
        else:
            records.append(NormRecord.expected(pairing, settings, unpaired))
    advice = _FORGETS if settings.prior is None and _was_trained(model, records) else ""
    converter = _Converter(model, unpaired)
    with _all_or_nothing(model, settings):
        for record in records:
            if record.status != LEFT:
                found = () if record.status == PENDING else pairings[record.name].segments
                converter.convert_norm_(record.name, found, settings)
    report = ConversionReport(records, model, advice)
    Scope.mark_(model, report.complete if report.pending else None)
    if settings.consistent:
        say(
            "consistent=True is an experiment: its steps take several times as long, compare with a training without it"
        )
    if settings.prior is not None and (norms := cross_iteration_norms(model)):
        without = [name for name, norm in norms.items() if norm.belief is None]
        if without:
            say(
                f'prior="running": {len(without)} of {len(norms)} norms, {without[0]} among them, are new or have no '
                "running statistics, and do without"
            )
    return report


def check_module(caller: str, model: object) -> None:
    """Raise TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a model, a torch.nn.Module, got {model!r}")


def check_options(
    *,
    window: int | None = None,
    batch_size: int | None = None,
    unpaired: str = "bn",
    config: Settings | None = None,
    filter_fn: object = None,
    pairs: object = None,
    example_inputs: object = None,
    **options: Any,
) -> Settings:
    """Return the settings that options of `convert_` make, or refuse them as it does, whatever the model.

    Raises:
        TypeError: for an option that does not exist, or both options and `config`.
        ValueError: for both or neither of `window` and `batch_size`, or a setting out of range.
    """
    del filter_fn, pairs, example_inputs  # of these only a model can tell
    if config is None or window is not None or batch_size is not None:
        if (window is None) == (batch_size is None):
            raise ValueError(f"give exactly one of window and batch_size, got {window!r} and {batch_size!r}")
        options["window"] = window if batch_size is None else window_for(batch_size)
    settings = Settings.of(config, options)
    if unpaired not in ("pool", "bn", "error"):
        raise ValueError(f"unpaired must be one of 'pool', 'bn', 'error', got {unpaired!r}")
    return settings


@contextmanager
def _all_or_nothing(model: nn.Module, settings: Settings) -> Iterator[None]:
    """Let the norms of a model be what they were if something goes wrong.

    Raises:
        ValueError: if there is no memory for what they are to remember.
    """
    before = {name: norm.settings for name, norm in cross_iteration_norms(model).items()}
    try:
        yield
    except Exception as error:
        for name, norm in cross_iteration_norms(model).items():
            if name not in before:
                norm._become_plain_()
            elif norm.settings != before[name]:
                norm.configure_(before[name])
        if "memory" not in str(error):  # as torch's allocators say it
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"a window of {settings.window} steps does not fit into memory: {reason}") from error


def revert_(model: nn.Module) -> None:
    """Turn every cross-iteration norm of `model` into the plain norm again, with the same parameters."""
    check_module("revert_", model)
    for norm in cross_iteration_norms(model).values():
        norm._become_plain_()
    Scope.unmark_(model)


def cross_iteration_norms(model: nn.Module) -> dict[str, CrossIterBatchNorm]:
    """Return the cross-iteration norms of `model` by qualified name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CrossIterBatchNorm)}


def _was_trained(model: nn.Module, records: Sequence[NormRecord]) -> bool:
    """Tell whether a norm that is to be converted has running statistics of a training, as a checkpoint's has."""
    for record in records:
        norm = model.get_submodule(record.name)
        if record.status != LEFT and isinstance(norm, BatchNormBase) and not isinstance(norm, CrossIterBatchNorm):
            mean, var = norm.running_mean, norm.running_var
            if mean is not None and var is not None and has_seen_something(mean, var):
                return True
    return False


def _given_pairs(model: nn.Module, pairs: Mapping[str, str | Sequence[str]]) -> dict[str, Pairing]:
    if not isinstance(pairs, Mapping):
        raise TypeError(f"pairs must map names of norms to names of producers, got {pairs!r}")
    modules, given = dict(model.named_modules()), {}
    for name, value in pairs.items():
        producers, norm = (value,) if isinstance(value, str) else tuple(value), modules.get(name)
        if not isinstance(norm, BatchNormBase):
            raise ValueError(f"pairs names the norm {name!r}, which the model does not have")
        for producer in producers:
            if producer not in modules or not is_linear_operator(modules[producer]):
                raise ValueError(f"pairs names the producer {producer!r} of {name}, which is no operator of the model")
            channels = geometry_of(modules[producer]).out_channels
            if channels != norm.num_features:
                raise ValueError(f"{name} has {norm.num_features} channels and its producer {producer} {channels}")
        # Not complete, so not direct: two norms that are given the same producer may read different calls of it.
        found = PairedSegment(norm.num_features, producers, False, _GIVEN)
        given[name] = Pairing(name, (found,), exclusive=False)
    return given


class _Converter:
    """Converts norms of a model. An operator is watched once, and its output has one segment, whomever it feeds."""

    def __init__(self, model: nn.Module, unpaired: str) -> None:
        self._model, self._unpaired = model, unpaired
        self._producers: dict[str, Producer] = {}
        self._shared: dict[tuple[tuple[str, ...], Settings], Segment] = {}

    def convert_norm_(self, name: str, found: Sequence[PairedSegment], settings: Settings) -> None:
        norm = self._model.get_submodule(name)
        fresh = not isinstance(norm, CrossIterBatchNorm)
        if fresh:
            norm.__class__ = _CONVERTED[_type_name(norm)]
        assert isinstance(norm, CrossIterBatchNorm)
        if norm.plain_type() is nn.SyncBatchNorm:
            group = settings.process_group or getattr(norm, "process_group", None)
            settings = replace(settings, sync=True, process_group=group)
        if fresh:
            norm._become_cross_iteration_(settings, name)
        norm.feeds.unpaired = self._unpaired
        wanted = [(each.channels, [self._model.get_submodule(name) for name in each.producers]) for each in found]
        present = [(segment.channels, [producer.module for producer in segment.producers]) for segment in norm.segments]
        if not fresh and (not found or wanted == present):
            norm.configure_(settings)
            return
        norm._set(settings)
        norm.feeds.set_main_([self._segment(each, norm) for each in found])

    def _segment(self, found: PairedSegment, norm: CrossIterBatchNorm) -> Segment:
        key = (found.producers, norm.settings)
        if found.direct and key in self._shared:
            return self._shared[key]
        for name in found.producers:
            if name not in self._producers:
                self._producers[name] = Producer(self._model.get_submodule(name))
        operators = [Operator.of_producer(self._producers[name]) for name in found.producers]
        segment = norm.feeds.make_segment(found.channels, operators, found.direct, given=found.reason == _GIVEN)
        return self._shared.setdefault(key, segment) if found.direct else segment


def _type_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
