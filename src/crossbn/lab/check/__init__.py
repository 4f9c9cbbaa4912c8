"""Is this installation right and fast on this device? A list of checks, the same for every device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch

from crossbn.lab.check.correctness import captured, operators, synchronizations
from crossbn.lab.check.finding import Finding
from crossbn.lab.check.speed import cost, launches
from crossbn.lab.cost import surroundings

CHECKS: dict[str, Callable[[torch.device], Finding]] = {
    "operators against the reference": operators,
    "synchronizations": synchronizations,
    "launches": launches,
    "CUDA graph": captured,
    "time and memory": cost,
}


@dataclass(frozen=True)
class CheckRecord:
    """What was found, to be kept or sent.

    Attributes:
        device: where.
        findings: by the name of the check.
        versions: of the software.
        machine: what it computes with.
        commit: of the source; "" if unknown.
    """

    device: str
    findings: dict[str, Finding]
    versions: dict[str, str] = field(default_factory=surroundings.versions)
    machine: dict[str, str] = field(default_factory=dict)
    commit: str = field(default_factory=surroundings.commit)

    @property
    def wrong(self) -> list[str]:
        """The checks that have failed."""
        return [name for name, finding in self.findings.items() if finding.passed is False]

    @property
    def verdict(self) -> str:
        """One sentence."""
        where = self.machine.get("accelerator") or self.machine.get("processor") or self.device
        if self.wrong:
            return f"Something is wrong on {self.device} ({where}): {', '.join(self.wrong)}."
        left = [name for name, finding in self.findings.items() if finding.passed is None]
        rest = f"; {', '.join(left)}: not on this device" if left else ""
        return f"All is right on {self.device} ({where}){rest}."

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps({"kind": "check", **asdict(self), "verdict": self.verdict})


def run(
    device: torch.device,
    watch: Callable[[str], None] = lambda _: None,
    checks: Mapping[str, Callable[[torch.device], Finding]] = CHECKS,
) -> CheckRecord:
    """Do all checks on a device; `watch` is told the name of each before it begins.

    A check that raises has failed: whatever it was is what the owner of the device wants to know.
    """
    findings = {}
    for name, check in checks.items():
        watch(name)
        try:
            findings[name] = check(device)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            findings[name] = Finding(False, f"{type(error).__name__}: {first}")
    return CheckRecord(str(device), findings, machine=surroundings.machine(str(device)))
