"""Is this installation right and fast on this device? A list of checks, the same for every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from crossbn.lab import environment
from crossbn.lab.check.correctness import captured, operators, synchronizations
from crossbn.lab.check.finding import Finding
from crossbn.lab.check.speed import cost, launches
from crossbn.lab.records import Record

CHECKS: dict[str, Callable[[torch.device], Finding]] = {
    "operators against the reference": operators,
    "synchronizations": synchronizations,
    "launches": launches,
    "CUDA graph": captured,
    "time and memory": cost,
}


def run(
    device: torch.device,
    watch: Callable[[str], None] = lambda _: None,
    checks: Mapping[str, Callable[[torch.device], Finding]] = CHECKS,
) -> dict[str, Finding]:
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
    return findings


def failed(findings: Mapping[str, Finding]) -> list[str]:
    """Return the names of the checks that have failed."""
    return [name for name, finding in findings.items() if finding.passed is False]


def verdict(findings: Mapping[str, Finding], device: str) -> str:
    """Return one sentence on what was found on a device."""
    machine = environment.machine(device)
    where = machine.get("accelerator") or machine["processor"]
    if wrong := failed(findings):
        return f"Something is wrong on {device} ({where}): {', '.join(wrong)}."
    left = [name for name, finding in findings.items() if finding.passed is None]
    rest = f"; {', '.join(left)}: not on this device" if left else ""
    return f"All is right on {device} ({where}){rest}."


def to_record(findings: Mapping[str, Finding], device: str) -> Record:
    """Return what was found, to be kept or sent."""
    values = {
        "findings": {name: asdict(finding) for name, finding in findings.items()},
        "verdict": verdict(findings, device),
    }
    return Record("check", device, 0, {"device": device}, values, environment.stamp(device))
