"""A window and a burn-in, from what was measured.

Pooling a step pays as long as its variance, moved to today's weights, is nearer to the true one than the variances of
single batches are to one another: then it averages away more than it brings in. So

- window: one more than the largest age up to which that holds, on average over the channels of all layers, in
  the later half of the measurements;
- burn-in: until the measurement after the last one, in the earlier half, at which it does not hold for that window.

The truth is that of the whole network.

Weights change fastest in the first steps, and a few measurements are mostly chance, so the advice can be trusted only
if

- there are 4 measurements at least: each half has two;
- the norms remembered 10 windows at least: a single one decides little, and momentum has reached its full pace;
- every age of the window was measured in the later half;
- advice against the window does not wear off: the last quarter of the measurements speaks for no longer one.

Where one of these fails, the sentence begins with that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossbn.lab.fidelity.records import (
    ALL,
    CAUSES,
    NORMS_BEFORE,
    OWN_WEIGHTS,
    WEIGHTS_BEFORE,
    WHOLE_NETWORK,
    CauseRecord,
    Fidelity,
    FidelityRecord,
    average_causes,
    by_age,
    by_progress,
)

_IN_WORDS = {
    OWN_WEIGHTS: "compensation for the layer's own weights is not exact",
    WEIGHTS_BEFORE: "the layers before have trained since",
    NORMS_BEFORE: "the norms before pooled other batches then",
}

FEWEST_MEASUREMENTS = 4
FEWEST_WINDOWS = 10


@dataclass(frozen=True)
class Recommendation:
    """What to train with.

    Attributes:
        window: steps to pool, today's included.
        burn_in: steps of plain BatchNorm first.
        sentence: both, and why; if they cannot be trusted, that first.
        trusted: whether enough was measured.
    """

    window: int
    burn_in: int
    sentence: str
    trusted: bool = True

    def __str__(self) -> str:
        return self.sentence


def verdict(records: Sequence[FidelityRecord], causes: Sequence[CauseRecord], window: int, burn_in: int = 0) -> str:
    """Return what to train with, or why that cannot be said, and what most of the error comes from."""
    try:
        sentence = recommend(records, window, burn_in).sentence
    except ValueError as error:
        sentence = f"No recommendation: {error}."
    if not causes:
        return sentence
    (found,) = average_causes(causes, parts=1).values()
    largest = max(CAUSES, key=lambda cause: found[cause][1])
    return (
        f"{sentence} Remembered variances are {found[ALL][1]:.1%} off those that the same images have in one large "
        f"batch, mostly because {_IN_WORDS[largest]} ({found[largest][1]:.1%})."
    )


def recommend(records: Sequence[FidelityRecord], window: int, burn_in: int = 0) -> Recommendation:
    """Recommend a window and a burn-in.

    Args:
        records: of a training; those count whose truth is the whole network, with two batches at least.
        window: it was trained with; no larger one is recommended.
        burn_in: it was trained with; no shorter one is recommended.

    Raises:
        ValueError: if there is no such record.

    Example:
        >>> found = Fidelity(8, 0.1, 0.05, 0.2, 0.1, 0.3, 0.0)
        >>> records = [FidelityRecord(step, "bn1", 1, WHOLE_NETWORK, found) for step in (50, 100, 150, 200)]
        >>> recommend(records, window=2).sentence[:48]
        'Window 2 serves: even at age 1 the compensated v'
        >>> recommend(records[:2], window=2).sentence[:54]
        'Too little was measured to rely on: 2 measurements whe'
    """
    network = [r for r in records if r.truth == WHOLE_NETWORK and r.fidelity.batch_noise is not None]
    if not network:
        raise ValueError("there is nothing to recommend from: no layer was compared with the whole network")
    steps = sorted({record.step for record in network})
    middle = steps[len(steps) // 2]
    late = _late(network, middle)
    reach = _reach(late)
    needed = _burn_in([r for r in network if r.step < middle and r.age <= reach], steps) if reach else 0
    last = max(burn_in, needed) if reach else 0
    reason = _reason(late, reach, window)
    if doubt := _doubt(network, steps, reach, window, burn_in):
        sentence = f"Too little was measured to rely on: {doubt}. So far: {reason[0].lower()}{reason[1:]}."
        return Recommendation(reach + 1, last, sentence, trusted=False)
    if not reach:
        return Recommendation(1, last, f"{reason}.")
    if needed > burn_in:
        progress = f"a burn-in of {last} steps would let the larger changes at the beginning pass"
    else:
        progress = f"the burn-in of {burn_in} steps is long enough" if burn_in else "no burn-in is needed"
    return Recommendation(reach + 1, last, f"{reason}; {progress}.")


def _late(network: Sequence[FidelityRecord], first: int) -> dict[int, Fidelity]:
    """Return the averages by age from a step on."""
    return {age: found[WHOLE_NETWORK] for age, found in by_age([r for r in network if r.step >= first]).items()}


def _reach(found: Mapping[int, Fidelity]) -> int:
    """Return the largest age up to which pooling pays; 0 if it does not at all."""
    reach = 0
    while reach + 1 in found and _pays(found[reach + 1]):
        reach += 1
    return reach


def _reason(late: Mapping[int, Fidelity], reach: int, window: int) -> str:
    if not reach:
        first = min(late)
        return f"Window 1, plain BatchNorm, or a lower learning rate: {_distance(first, late[first])}"
    if reach + 1 < window and reach + 1 in late:
        return f"Window {reach + 1} instead of {window}: {_distance(reach + 1, late[reach + 1])}"
    return f"Window {reach + 1} serves: {_distance(reach, late[reach])}"


def _doubt(
    network: Sequence[FidelityRecord], steps: Sequence[int], reach: int, window: int, burn_in: int
) -> str | None:
    """Say what is missing for advice that can be trusted; None if nothing is."""
    if len(steps) < FEWEST_MEASUREMENTS:
        return f"{_count(len(steps), 'measurement')} where it takes {FEWEST_MEASUREMENTS}"
    remembered = steps[-1] - burn_in
    if remembered < FEWEST_WINDOWS * window:
        return f"{_count(remembered, 'step')} where a window of {window} takes {FEWEST_WINDOWS * window}"
    oldest = max(_late(network, steps[len(steps) // 2]))
    if oldest < window - 1:
        return f"no statistics older than {_count(oldest, 'step')} where a window of {window} has {window - 1}"
    latest = _reach(_late(network, steps[-(len(steps) // 4)]))
    if reach < latest:
        return f"the network still settles, and its last measurements alone speak for window {latest + 1}"
    return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _pays(found: Fidelity) -> bool:
    assert found.batch_noise is not None, "records without it do not count"
    return found.compensated_var_error <= found.batch_noise


def _burn_in(early: Sequence[FidelityRecord], steps: Sequence[int]) -> int:
    """Return the first measured step after the last one at which pooling does not pay; 0 if there is none."""
    failed = [step for step, found in by_progress(early).items() if not _pays(found[WHOLE_NETWORK])]
    return next(step for step in steps if step > failed[-1]) if failed else 0


def _distance(age: int, found: Fidelity) -> str:
    error, noise = f"{found.compensated_var_error:.1%}", f"{found.batch_noise:.1%}"
    if _pays(found):
        return (
            f"even at age {age} the compensated variance is nearer to the true one ({error} off) than the variances of "
            f"single batches are to their average ({noise})"
        )
    return (
        f"at age {age} the compensated variance is further from the true one ({error} off) than the variances of "
        f"single batches are from their average ({noise})"
    )
