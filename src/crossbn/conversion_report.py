"""What conversion did with each norm, and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from crossbn.functional import Settings
from crossbn.messages import say
from crossbn.nn.layer import CrossIterBatchNorm
from crossbn.pairing import Pairing

COMPENSATED = "compensated"
POOLED = "pooled"
LEFT = "left alone"
PENDING = "pending"

_ENOUGH = 0.9


@dataclass(frozen=True)
class NormRecord:
    """One norm of a converted model.

    Attributes:
        name: its qualified name.
        status: "compensated", "pooled" (without compensation), "left alone", or "pending" until a training forward has
            shown what feeds it.
        producers: qualified names of the operators that feed it.
        reason: one phrase.
        asked: whether it is so because the caller has asked for it.
    """

    name: str
    status: str
    producers: tuple[str, ...]
    reason: str
    asked: bool = False

    @classmethod
    def expected(cls, pairing: Pairing, settings: Settings, unpaired: str) -> NormRecord:
        """Return what will become of a norm by what pairing knows of it, with these options of `convert_`.

        Raises:
            ValueError: if no operator feeds it, with `unpaired="error"`.
        """
        name, producers, segments = pairing.name, pairing.producers, pairing.segments
        reasons = "; ".join(dict.fromkeys(segment.reason for segment in segments))
        if settings.order == 0:
            return cls(name, POOLED, producers, "order 0 compensates nothing")
        through = settings.compensate_through is not None  # the graph will tell what is behind an activation
        if not all(segment.final and (segment.producers or not through) for segment in segments):
            return cls(name, PENDING, (), f"partly {reasons}" if producers else reasons)
        if not producers and unpaired == "error":
            raise ValueError(f"no linear operator feeds {name or 'the model'}: {reasons}")
        if not producers:
            return cls(name, POOLED if unpaired == "pool" else LEFT, (), reasons)
        if lacking := [f"{each.channels} channels {each.reason}" for each in segments if not each.producers]:
            reasons = f"{'pooled only' if unpaired == 'pool' else 'not pooled'}: {'; '.join(lacking)}"
        elif len(segments) > 1:
            reasons = f"concatenation of {len(segments)}"
        elif segments[0].direct:
            reasons = "direct"
        return cls(name, COMPENSATED, producers, reasons)


class ConversionReport:
    """Every norm of a converted model, in the model's order; printed, it is a table.

    Norms whose operator is not to be found without running the model are pending. The first training forward completes
    the report: it is then logged, and a warning says if much was left alone. `advice` is a sentence below the table.
    """

    def __init__(self, records: Iterable[NormRecord], model: nn.Module | None = None, advice: str = "") -> None:
        self._records = tuple(records)
        self._model = model
        self.advice = advice
        if not self.pending:
            self.complete()

    @property
    def records(self) -> tuple[NormRecord, ...]:
        """A record for each norm."""
        if self._model is not None:
            self._records = tuple(_resolved(record, self._model) for record in self._records)
            if not any(record.status == PENDING for record in self._records):
                self._model = None
        return self._records

    def complete(self) -> bool:
        """Log the report, and warn if it is not what was hoped for; False if nothing has come out yet."""
        before = len([record for record in self._records if record.status == PENDING])
        if before and len(self.pending) == before:
            return False
        logging.getLogger("crossbn").info("%s", self)
        meant = [record for record in self.records if not record.asked]
        helped = [record for record in meant if record.status in (COMPENSATED, POOLED)]
        if not self.records:
            say("the model has no batch norm: nothing was converted")
        elif len(helped) < _ENOUGH * len(meant):
            say(f"{len(meant) - len(helped)} of {len(meant)} norms stay BatchNorm: {_main_reasons(meant)}. {_REMEDY}")
        return True

    def _with_status(self, status: str) -> list[NormRecord]:
        return [record for record in self.records if record.status == status]

    @property
    def compensated(self) -> list[NormRecord]:
        """Norms whose remembered statistics follow the weights of what feeds them, wholly or in part."""
        return self._with_status(COMPENSATED)

    @property
    def pooled(self) -> list[NormRecord]:
        """Norms whose remembered statistics are pooled as they are."""
        return self._with_status(POOLED)

    @property
    def left(self) -> list[NormRecord]:
        """Norms that stayed what they were."""
        return self._with_status(LEFT)

    @property
    def pending(self) -> list[NormRecord]:
        """Norms of which the first training forward will tell."""
        return self._with_status(PENDING)

    def __str__(self) -> str:
        rows = [("layer", "status", "producers", "reason")]
        rows += [(r.name or "(root)", r.status, _shorten(", ".join(r.producers)), r.reason) for r in self.records]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """Return the counts as one line, and the advice if there is any."""
        counts = [f"{len(self._with_status(status))} {status}" for status in (COMPENSATED, POOLED, LEFT)]
        if self.pending:
            counts.append(f"{len(self.pending)} pending")
        line = f"{len(self.records)} norms: {', '.join(counts)}"
        return f"{line}\n{self.advice}" if self.advice else line


_REMEDY = (
    "Compensation needs a convolution or linear layer right before the norm, trained, and seen by the graph; print the "
    "report for each norm's reason. compensate_through='activations' looks through elementwise ones, pairs= names an "
    "operator that pairing has missed, unpaired='pool' pools without compensation"
)


def _main_reasons(records: list[NormRecord]) -> str:
    counts = Counter(record.reason for record in records if record.status in (LEFT, PENDING))
    return ", ".join(f"{reason} ({count})" for reason, count in counts.most_common(3))


def _resolved(record: NormRecord, model: nn.Module) -> NormRecord:
    """Return what has come out about a pending norm."""
    norm = model.get_submodule(record.name) if record.status == PENDING else None
    if not isinstance(norm, CrossIterBatchNorm):
        return record
    if operators := [operator for segment in norm.segments for operator in segment.operators]:
        owners = {
            id(parameter): name or "(root)"
            for name, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        producers = dict.fromkeys(owners.get(id(each.parameter), "a computed weight") for each in operators)
        through = dict.fromkeys(f"through {each.activation.name}" for each in norm.segments if each.activation)
        return NormRecord(record.name, COMPENSATED, tuple(producers), ", ".join([*through, "read from the graph"]))
    if norm.plain_reason is not None:
        return NormRecord(record.name, LEFT, (), norm.plain_reason)
    pooled = any(int(segment.history.num_steps) for segment in norm.segments)
    return NormRecord(record.name, POOLED, (), record.reason) if pooled else record


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
