"""Measuring a case: all its norms side by side in one process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from crossbn.lab.cost import surroundings
from crossbn.lab.cost.cases import BASELINE, WINDOWED, Case
from crossbn.lab.cost.flops import Flops, count_step
from crossbn.lab.cost.models import Build, find_model
from crossbn.lab.cost.records import CostRecord
from crossbn.lab.cost.subject import Subject
from crossbn.lab.cost.timing import Timing, clock_of, interleave
from crossbn.lab.cost.workshop import Variant, Workshop

Watch = Callable[[str], None]
Subjects = Mapping[Variant, Subject]

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
        return _measure(case, Workshop(case, build or find_model(case.model)), watch)


def _measure(case: Case, workshop: Workshop, watch: Watch) -> list[CostRecord]:
    paired_weight_bytes = workshop.paired_weight_bytes()
    watch("building the models")
    subjects = workshop.subjects()
    timings = _time_training(case, subjects, workshop, watch)
    watch("peak memory")
    peaks = {variant: subject.peak_bytes() for variant, subject in subjects.items()}
    watch("counting FLOPs")
    network, norms = _count(subjects, workshop)
    for variant, found in _time_inference(case, subjects, watch).items():
        timings[variant] |= found
    return [
        CostRecord(
            case,
            variant.norm,
            variant.compiled,
            timings[variant],
            peaks[variant],
            subject.history_bytes(),
            paired_weight_bytes,
            network,
            norms[variant.norm],
            machine=surroundings.machine(case.device),
        )
        for variant, subject in subjects.items()
    ]


def _time_training(
    case: Case, subjects: Subjects, workshop: Workshop, watch: Watch
) -> dict[Variant, dict[str, Timing]]:
    burning = {v: workshop.subject(v, ENDLESS) for v in subjects if v.norm in WINDOWED}
    work = {("train", variant): subject.train_step for variant, subject in subjects.items()}
    work |= {("burn_in", variant): subject.train_step for variant, subject in burning.items()}
    baselines = {key: ("train", Variant(BASELINE, key[1].compiled)) for key in work}
    return _time(case, "training", work, baselines, watch)


def _time_inference(case: Case, subjects: Subjects, watch: Watch) -> dict[Variant, dict[str, Timing]]:
    for subject in subjects.values():
        subject.optimizer.zero_grad(set_to_none=True)
        subject.model.eval()
    folded = {variant: subject.folded() for variant, subject in subjects.items()}
    work = {("eval", variant): subject.infer for variant, subject in subjects.items()}
    work |= {("folded", variant): subject.infer for variant, subject in folded.items() if subject is not None}
    baselines = {}
    for measure_name, variant in work:
        own = (measure_name, Variant(BASELINE, variant.compiled))
        baselines[measure_name, variant] = own if own in work else ("eval", own[1])
    return _time(case, "inference", work, baselines, watch)


_Key = tuple[str, Variant]


def _time(
    case: Case,
    what: str,
    work: Mapping[_Key, Callable[[], None]],
    baselines: Mapping[_Key, _Key],
    watch: Watch,
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
    return timings


def _within(uncertainty: float | None) -> str:
    return "" if uncertainty is None else f", ± {uncertainty:.1%}"


def _count(subjects: Subjects, workshop: Workshop) -> tuple[Flops, dict[str, Flops]]:
    """Return the products of the network without norms, and what each norm adds to its step."""
    bare = count_step(workshop.without_norms().loss)
    norms = {}
    for variant, subject in subjects.items():
        if not variant.compiled:
            subject.optimizer.zero_grad(set_to_none=True)  # accumulating a gradient is an addition
            norms[variant.norm] = count_step(subject.loss).total - bare.total
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
