"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        passed: whether all is right; None if it cannot be checked on the device.
        sentence: for a reader.
        values: the numbers behind it, by name.
    """

    passed: bool | None
    sentence: str
    values: dict[str, float] = field(default_factory=dict)
