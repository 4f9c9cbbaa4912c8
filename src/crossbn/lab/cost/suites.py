"""Cases that stand for many, with what they should come to."""

from typing import Any, NamedTuple

from crossbn.lab.cost.cases import Case
from crossbn.lab.cost.records import CostRecord
from crossbn.messages import no_such


class Ratios(NamedTuple):
    """CBN relative to BN, as `CostRecord` names what is measured; None where there is nothing to say."""

    train: float | None = None
    burn_in: float | None = None
    eval: float | None = None
    folded: float | None = None
    history: float | None = None  # what is remembered, relative to the weights of the operators that feed the norms
    peak: float | None = None
    folded_to_gn: float | None = None  # folded inference, relative to GN's inference, which nothing folds

    @classmethod
    def of(cls, cbn: CostRecord, bn: CostRecord) -> "Ratios":
        """Return the ratios that records of the same case come to."""
        times = {name: timing.ratio for name, timing in cbn.timings.items()}
        history = cbn.history_bytes / cbn.paired_weight_bytes if cbn.paired_weight_bytes else None
        return cls(**times, history=history, peak=cbn.peak_bytes / bn.peak_bytes)


class Goal(NamedTuple):
    """A case and the ratios to stay within."""

    case: Case
    target: Ratios


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
    faster = 1.0 if "gn" in norms else None
    return [
        Goal(
            Case(model, (3, size, size), batch_size, window, norms=norms, **settings),
            # In burn-in, in evaluation and folded the layer does what BN does.
            Ratios(train=train, burn_in=1.01, eval=1.01, folded=1.0, history=window - 1.0, folded_to_gn=faster),
        )
        for model, size, batch_size, window, train in targets
    ]
