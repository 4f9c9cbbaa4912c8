"""Measuring a case: all its norms side by side in one process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import torch

from crossbn.lab import environment
from crossbn.lab.cost.cases import BASELINE, WINDOWED, Case
from crossbn.lab.cost.factory import Build, ModelFactory, Variant
from crossbn.lab.cost.flops import count_step
from crossbn.lab.cost.records import CostRecord, Flops
from crossbn.lab.cost.timed_model import TimedModel
from crossbn.lab.cost.timing import Timing, clock_of, interleave
from crossbn.lab.models import find_model

Watch = Callable[[str], None]
Models = Mapping[Variant, TimedModel]

ENDLESS = 2**31  # steps of a burn-in


def measure(case: Case, build: Build | None = None, watch: Watch = lambda _: None) -> list[CostRecord]:
    """Measure time, memory and FLOPs of a case; return a record for each of its norms, then for each compiled.

    Args:
        case: what to measure.
        build: makes the model; None for `find_model(case.model)`.
        watch: called with a phrase whenever there is something new to say on where the work stands.

    Raises:
        ValueError: if there is no such model.
        CaseError: if it does not run with this input, or has no BatchNorm.

    Example:
        >>> from crossbn.lab.cost import Case, Precision
        >>> case = Case("tiny", (3,), batch_size=4, window=2, norms=("bn", "cbn"), precision=Precision(6, 1e9))
        >>> bn, cbn = measure(case, lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)))
        >>> bn.norm_flops.forward, bn.history_bytes, sorted(cbn.timings)
        (192, 0, ['burn_in', 'eval', 'folded', 'train'])
    """
    with _threads(case.threads), _room_for_graphs() if case.compile else nullcontext():
        return _measure(case, ModelFactory(case, build or find_model(case.model)), watch)


def _measure(case: Case, factory: ModelFactory, watch: Watch) -> list[CostRecord]:
    paired_weight_bytes = factory.paired_weight_bytes()
    watch("building the models")
    models = factory.variants()
    timings = _time_training(case, models, factory, watch)
    watch("peak memory")
    peaks = {variant: model.peak_bytes() for variant, model in models.items()}
    watch("counting FLOPs")
    network, norms = _count(models, factory)
    for variant, found in _time_inference(case, models, watch).items():
        timings[variant] |= found
    made = environment.stamp(case.device)
    records = []
    for variant, model in models.items():
        sizes = peaks[variant], model.history_bytes(), paired_weight_bytes
        records.append(CostRecord(case, *variant, timings[variant], *sizes, network, norms[variant.norm], made))
    return records


def _time_training(case: Case, models: Models, factory: ModelFactory, watch: Watch) -> dict[Variant, dict[str, Timing]]:
    burning = {v: factory.variant(v, ENDLESS) for v in models if v.norm in WINDOWED}
    work = {("train", variant): model.train_step for variant, model in models.items()}
    work |= {("burn_in", variant): model.train_step for variant, model in burning.items()}
    baselines = {key: ("train", Variant(BASELINE, key[1].compiled)) for key in work}
    return _time(case, "training", work, baselines, watch)


def _time_inference(case: Case, models: Models, watch: Watch) -> dict[Variant, dict[str, Timing]]:
    for timed in models.values():
        timed.optimizer.zero_grad(set_to_none=True)
        timed.model.eval()
    folded = {variant: model.folded() for variant, model in models.items()}
    work = {("eval", variant): model.infer for variant, model in models.items()}
    work |= {("folded", variant): model.infer for variant, model in folded.items() if model is not None}
    baselines = {}
    for measure_name, variant in work:
        own = (measure_name, Variant(BASELINE, variant.compiled))
        baselines[measure_name, variant] = own if own in work else ("eval", own[1])
    return _time(case, "inference", work, baselines, watch, {"folded_to_gn": ("folded", "eval", "gn")})


_Key = tuple[str, Variant]


def _time(
    case: Case,
    what: str,
    work: Mapping[_Key, Callable[[], None]],
    baselines: Mapping[_Key, _Key],
    watch: Watch,
    further: Mapping[str, tuple[str, str, str]] = MappingProxyType({}),
) -> dict[Variant, dict[str, Timing]]:
    watch(f"{what}, warming up")
    seconds = interleave(
        work,
        baselines,
        warm_up=max(3, case.window),  # by then the window is full
        precision=case.precision,
        clock=clock_of(torch.device(case.device)),
        watch=lambda rounds, uncertainty: watch(f"{what}, round {rounds}{_within(uncertainty)}"),
    )
    timings: dict[Variant, dict[str, Timing]] = {}
    for key, own in seconds.items():
        timings.setdefault(key[1], {})[key[0]] = Timing.of(own, seconds[baselines[key]])
    for name, (measured, other_measured, norm) in further.items():  # what is compared with another norm than BN
        for variant in timings:
            own_key, other = (measured, variant), (other_measured, Variant(norm, variant.compiled))
            if own_key in work and other in work:
                timings[variant][name] = Timing.of(seconds[own_key], seconds[other])
    return timings


def _within(uncertainty: float | None) -> str:
    return "" if uncertainty is None else f", ± {uncertainty:.1%}"


def _count(models: Models, factory: ModelFactory) -> tuple[Flops, dict[str, Flops]]:
    """Return the products of the network without norms, and what each norm adds to its step."""
    bare = count_step(factory.without_norms().loss)
    norms = {}
    for variant, model in models.items():
        if not variant.compiled:
            model.optimizer.zero_grad(set_to_none=True)  # accumulating a gradient is an addition
            norms[variant.norm] = count_step(model.loss).total - bare.total
    return bare.products, norms


@contextmanager
def _threads(amount: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(amount)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _room_for_graphs() -> AbstractContextManager[None]:
    """Every norm compiles the same forward anew; beyond the usual limit torch would go on without compiling."""
    import torch._dynamo.config  # here: it takes a second

    room: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=256)
    return room
