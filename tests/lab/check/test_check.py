"""The checks of a device: what they find, and what they say of what is wrong."""

import json

import pytest
import torch
from torch import Tensor

from crossbn import ops
from crossbn.lab import check
from crossbn.lab.check import correctness, speed
from crossbn.lab.check.finding import Finding
from crossbn.lab.records import Record

CPU = torch.device("cpu")


def test_operators_agree_and_a_wrong_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: correctness.OPERATORS[name] for name in ("depthwise", "linear")}
    monkeypatch.setattr(correctness, "OPERATORS", chosen)
    found = correctness.operators(CPU)
    assert found.passed
    assert max(found.values.values()) < 1e-5
    real = ops.cpu.step_backward

    def wrong(grad: Tensor, *rest: object) -> object:
        return real(1.1 * grad, *rest)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(ops.cpu, "step_backward", wrong)
    found = correctness.operators(CPU)
    assert found.passed is False
    assert found.sentence.startswith("off by more than 0.002: depthwise (0.")


def test_reading_a_value_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.reference.step

    def reading(inputs: ops.StepInputs, *rest: object) -> object:
        float(inputs.x.sum())
        return real(inputs, *rest)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(ops.reference, "step", reading)
    found = check.run(CPU, checks={"synchronizations": correctness.synchronizations})
    assert check.failed(found) == ["synchronizations"]
    assert "meta" in found["synchronizations"].sentence


def test_graphs_are_of_cuda() -> None:
    assert correctness.captured(CPU).passed is None


def test_launches_are_counted() -> None:
    found = speed.launches(CPU)
    assert found.passed
    assert min(found.values["cbn"], found.values["bn"]) > 100
    assert found.values["more a norm"] == (found.values["cbn"] - found.values["bn"]) / 20
    assert found.sentence.endswith("norms: 20 by C")


def test_verdict_and_record() -> None:
    def broken(_: torch.device) -> Finding:
        raise RuntimeError("no such kernel\nand more")

    told: list[str] = []
    fine = {"one": lambda _: Finding(True, "well"), "two": lambda _: Finding(None, "not here")}
    found = check.run(CPU, told.append, fine)
    assert told == ["one", "two"]
    assert not check.failed(found)
    assert check.verdict(found, "cpu").endswith("; two: not on this device.")
    found = check.run(CPU, checks={**fine, "three": broken})
    assert check.failed(found) == ["three"]
    read = Record.from_json(check.to_record(found, "cpu").to_json())
    assert (read.kind, read.settings) == ("check", {"device": "cpu"})
    broken_one = read.values["findings"]["three"]
    assert broken_one == {"passed": False, "sentence": "RuntimeError: no such kernel", "values": {}}
    assert read.values["verdict"].startswith("Something is wrong on cpu")
    assert read.environment["versions"]["torch"] == torch.__version__


def test_earlier_lines_are_read() -> None:
    line = {"kind": "check", "device": "cpu", "findings": {}, "verdict": "All is right.", "versions": {"torch": "2.8"}}
    read = Record.from_json(json.dumps({**line, "machine": {}, "commit": ""}))
    assert (read.kind, read.settings, read.values["verdict"]) == ("check", {"device": "cpu"}, "All is right.")
