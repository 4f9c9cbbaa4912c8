"""Cases that stand for many, with what they should come to."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from crossbn.lab.cost.cases import Case
from crossbn.lab.cost.records import CostRecord
from crossbn.messages import no_such


class Goal(NamedTuple):
    """A case, and what CBN's ratios to BN should stay within, by name as `ratios_of` has them."""

    case: Case
    targets: Mapping[str, float]


def ratios_of(cbn: CostRecord, bn: CostRecord) -> dict[str, float]:
    """Return the ratios that records of the same case come to: times by measure, peak memory, history / weights."""
    found = {name: timing.ratio for name, timing in cbn.timings.items()} | {"peak": cbn.peak_bytes / bn.peak_bytes}
    if cbn.paired_weight_bytes:
        found["history"] = cbn.history_bytes / cbn.paired_weight_bytes
    return found


# model, image size, batch size, window, time of a training step
_TARGETS = (
    ("resnet18", 224, 4, 4, 1.06),
    ("resnet50", 224, 4, 4, 1.06),
    ("resnet18", 224, 2, 8, 1.12),
    ("resnet18", 112, 4, 4, 1.15),
    ("mobilenet_v2", 224, 4, 4, 1.10),
    ("densenet121", 224, 4, 4, 1.10),
)
_DETECTION = (("crossbn.lab.recipes.detection.costed:faster_rcnn_resnet18", 256, 2, 8, 1.10),)
_SUITES = {"targets": (_TARGETS, ("bn", "cbn")), "detection": (_DETECTION, ("bn", "gn", "cbn"))}
SUITES = tuple(_SUITES)


def make_suite(name: str, **settings: Any) -> list[Goal]:
    """Return the cases of a suite with their targets.

    Args:
        name: one of `SUITES`.
        settings: of each case, as `Case` takes them.

    Raises:
        ValueError: if there is no such suite.

    Example:
        >>> str(make_suite("targets")[0].case)
        'resnet18, input 3x224x224, batch 4, window 4'
    """
    if name not in SUITES:
        raise ValueError(no_such("suite", name, SUITES))
    targets, norms = _SUITES[name]
    # In burn-in, in evaluation and folded the layer does what BN does; nothing folds GN.
    alike = {"burn_in": 1.01, "eval": 1.01, "folded": 1.0, **({"folded_to_gn": 1.0} if "gn" in norms else {})}
    return [
        Goal(
            Case(model, (3, size, size), batch_size, window, norms=norms, **settings),
            {"train": train, **alike, "history": window - 1.0},
        )
        for model, size, batch_size, window, train in targets
    ]
