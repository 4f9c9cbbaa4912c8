"""What conversion did with each norm, and why."""

from collections.abc import Iterator
from dataclasses import dataclass

COMPENSATED = "compensated"
POOLED = "pooled"
LEFT = "left alone"


@dataclass(frozen=True)
class NormRecord:
    """One norm of a converted model.

    Attributes:
        name: its qualified name.
        status: "compensated", "pooled" (without compensation) or "left alone".
        producers: qualified names of the operators that feed it.
        reason: one phrase.
    """

    name: str
    status: str
    producers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """Every norm of a converted model, in the model's order; printed, it is a table."""

    records: tuple[NormRecord, ...]

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

    def __str__(self) -> str:
        rows = [("layer", "status", "producers", "reason")]
        rows += [(r.name or "(root)", r.status, _shorten(", ".join(r.producers)), r.reason) for r in self.records]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join([*_lines(rows, widths), self.summary()])

    def summary(self) -> str:
        """Return the counts as one line."""
        counts = (len(self.compensated), len(self.pooled), len(self.left))
        return f"{len(self.records)} norms: {counts[0]} compensated, {counts[1]} pooled, {counts[2]} left alone"


def _lines(rows: list[tuple[str, str, str, str]], widths: list[int]) -> Iterator[str]:
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
