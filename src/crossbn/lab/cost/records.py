"""What was measured: a record for each norm of a case, eager and compiled."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from crossbn.lab import environment
from crossbn.lab import records as files
from crossbn.lab.cost.cases import BASELINE, Case
from crossbn.lab.cost.timing import Precision, Timing
from crossbn.lab.records import MALFORMED, Record, RecordError


@dataclass(frozen=True)
class Flops:
    """Counts of a training step, forward and backward; `crossbn.lab.cost.flops` has the convention."""

    forward: int
    backward: int

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def __sub__(self, other: "Flops") -> "Flops":
        return Flops(self.forward - other.forward, self.backward - other.backward)


@dataclass(frozen=True)
class CostRecord:
    """What a model costs with one norm.

    Attributes:
        case: what was asked for.
        norm: which of its norms.
        compiled: whether the model was called through `torch.compile`.
        timings: by measure: "train", a training step with the window full; "burn_in", one before the window opens
            (norms with a window only; the baseline is BN's training step); "eval", inference; "folded", inference with
            the norms folded into the operators before them, if any can be. Ratios are to BN in the same measure,
            compiled to compiled; those of "folded_to_gn" are of folded inference to GN's, where GN was measured.
        peak_bytes: in use at the height of a training step.
        history_bytes: of it, what the norms remember of earlier steps.
        paired_weight_bytes: weights of the operators that feed the model's norms.
        network_flops: of convolutions and matrix products of the model without its norms, for the whole batch.
        norm_flops: what the norms add. Both are of the eager step.
        environment: software, machine and state of the source, as `crossbn.lab.environment.stamp` has them.
    """

    case: Case
    norm: str
    compiled: bool
    timings: Mapping[str, Timing]
    peak_bytes: int
    history_bytes: int
    paired_weight_bytes: int
    network_flops: Flops
    norm_flops: Flops
    environment: Mapping[str, Any] = field(default_factory=environment.stamp)

    @property
    def name(self) -> str:
        """The norm, as tables call it."""
        return f"{self.norm.upper().replace('_', ' ')}{', compiled' if self.compiled else ''}"

    def answers(self, case: Case) -> bool:
        """Tell whether `case` need not be measured again: this is of it, with the same software and machine."""
        return self.case == case and self.environment == environment.stamp(case.device)

    def record(self) -> Record:
        """Return what a file keeps."""
        found = asdict(self)
        settings = {**found.pop("case"), "norm": found.pop("norm"), "compiled": found.pop("compiled")}
        stamp = found.pop("environment")
        return Record("cost", f"{self.case}, {self.name}", 0, settings, found, stamp)

    @classmethod
    def of(cls, record: Record) -> "CostRecord":
        """Return what `record()` made the record of.

        Raises:
            KeyError: if a field is missing.
            TypeError: if a field is something else.
        """
        told = {each.name: record.settings[each.name] for each in fields(Case)}
        told |= {name: tuple(told[name]) for name in ("input_shape", "norms")}
        case = Case(**{**told, "precision": Precision(**told["precision"])})
        found = dict(record.values)
        found["timings"] = {name: Timing(**timing) for name, timing in found["timings"].items()}
        found |= {name: Flops(**found[name]) for name in ("network_flops", "norm_flops")}
        return cls(case, record.settings["norm"], record.settings["compiled"], **found, environment=record.environment)


def find_baseline(record: CostRecord, records: Iterable[CostRecord]) -> CostRecord:
    """Return BN's record of the same case."""
    return next(r for r in records if (r.case, r.compiled, r.norm) == (record.case, record.compiled, BASELINE))


def read(path: Path) -> list[CostRecord]:
    """Return the records of a file, none if there is no such file.

    Raises:
        RecordError: if a line is something else.
    """
    found = []
    for number, record in enumerate(files.read(path), start=1):
        try:
            found.append(CostRecord.of(record))
        except MALFORMED as error:
            raise RecordError(f"line {number} of {path} is not a record of costs") from error
    return found
