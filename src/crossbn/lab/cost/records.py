"""What was measured, as lines of JSON: one for each norm of a case, eager and compiled."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from crossbn.lab.cost import surroundings
from crossbn.lab.cost.cases import BASELINE, Case
from crossbn.lab.cost.flops import Flops
from crossbn.lab.cost.timing import Precision, Timing
from crossbn.lab.records import append_lines, read_lines

MEASURES = ("train", "burn_in", "eval", "folded")


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
            compiled to compiled.
        peak_bytes: in use at the height of a training step.
        history_bytes: of it, what the norms remember of earlier steps.
        paired_weight_bytes: weights of the operators that feed the model's norms.
        network_flops: of convolutions and matrix products of the model without its norms, for the whole batch.
        norm_flops: what the norms add. Both are of the eager step.
        versions: of the software, by name.
        machine: what the machine computes with.
        commit: state of the source; "" if it is not known.
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
    versions: Mapping[str, str] = field(default_factory=surroundings.versions)
    machine: Mapping[str, str] = field(default_factory=lambda: surroundings.machine("cpu"))
    commit: str = field(default_factory=surroundings.commit)

    @property
    def name(self) -> str:
        """The norm, as tables call it."""
        return f"{self.norm.upper().replace('_', ' ')}{', compiled' if self.compiled else ''}"

    def answers(self, case: Case) -> bool:
        """Tell whether `case` need not be measured again: this is of it, with the same software and machine."""
        here = (surroundings.versions(), surroundings.machine(case.device), surroundings.commit())
        return self.case == case and (self.versions, self.machine, self.commit) == here

    def to_json(self) -> str:
        """Return the record as one line; the case's fields stand beside the others."""
        own = asdict(self)
        return json.dumps({**own.pop("case"), **own})

    @classmethod
    def from_json(cls, line: str) -> "CostRecord":
        """Return the record that `to_json` turned into `line`.

        Raises:
            ValueError: if the line is not JSON.
            KeyError: if it lacks a field.
            TypeError: if a field is something else.
        """
        found = json.loads(line)
        told = {each.name: found[each.name] for each in fields(Case)}
        told |= {"input_shape": tuple(told["input_shape"]), "norms": tuple(told["norms"])}
        told["precision"] = Precision(**told["precision"])
        own = {each.name: found[each.name] for each in fields(cls) if each.name != "case"}
        own["timings"] = {name: Timing(**timing) for name, timing in own["timings"].items()}
        own |= {name: Flops(**own[name]) for name in ("network_flops", "norm_flops")}
        return cls(Case(**told), **own)


def find_baseline(record: CostRecord, records: Iterable[CostRecord]) -> CostRecord:
    """Return BN's record of the same case."""
    return next(r for r in records if (r.case, r.compiled, r.norm) == (record.case, record.compiled, BASELINE))


def append_records(path: Path, records: Sequence[CostRecord]) -> None:
    """Add lines to the file, which need not exist yet."""
    append_lines(path, records)


def read_records(path: Path) -> list[CostRecord]:
    """Return the records of a file, none if there is no such file.

    Raises:
        RecordError: if a line is not a record.
    """
    return read_lines(path, CostRecord.from_json, "a record of costs")
