import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from crossbn.cli import check as command
from crossbn.cli import make_app
from crossbn.lab.check import CheckRecord
from crossbn.lab.check.finding import Finding

_RATIOS = {"resnet18, batch 1, cbn, time": 1.25, "resnet18, batch 1, cbn, memory": 1.5}


@pytest.mark.parametrize("is_right", [True, False])
def test_it_tells_and_keeps_what_was_found(is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: torch.device, watch: Callable[[str], None]) -> CheckRecord:
        watch("launches")
        findings = {"launches": Finding(is_right, "ten"), "time and memory": Finding(True, "fast", _RATIOS)}
        return CheckRecord(str(device), findings)

    monkeypatch.setattr(command, "run", run)
    done = CliRunner().invoke(make_app(), ["check", "--device", "cpu", "--output", str(tmp_path)])
    assert done.exit_code == (0 if is_right else 1)
    assert "launches ..." in done.output
    assert "1.25" in done.output
    assert ("All is right on cpu" if is_right else "Something is wrong on cpu (cpu): launches.") in done.output
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["findings"]["launches"]["passed"] is is_right


def test_no_such_device() -> None:
    done = CliRunner().invoke(make_app(), ["check", "--device", "abacus"])
    assert done.exit_code == 2
    assert "there is no device 'abacus'" in done.output
