import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from crossbn.lab import check, environment, records
from crossbn.lab.check.finding import Finding
from tests.cli.answers import call

_RATIOS = {"resnet18, batch 1, cbn, time": 1.25, "resnet18, batch 1, cbn, memory": 1.5}


@pytest.mark.parametrize("is_right", [True, False])
def test_it_tells_and_keeps_what_was_found(is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: torch.device, watch: Callable[[str], None]) -> dict[str, Finding]:
        watch("launches")
        assert device == torch.device("cpu")
        return {"launches": Finding(is_right, "ten"), "time and memory": Finding(True, "fast", _RATIOS)}

    monkeypatch.setattr(check, "run", run)
    done = call("check", "--device", "cpu", "--output", tmp_path)
    assert done.status == (0 if is_right else 1)
    assert "launches ..." in done.errors
    assert "1.25" in done.output
    assert (
        "All is right on cpu"
        if is_right
        else f"Something is wrong on cpu ({environment.machine('cpu')['processor']}): launches."
    ) in done.output
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["values"]["findings"]["launches"]["passed"] is is_right


def test_a_folder_in_use_and_a_damaged_file_are_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run", lambda *_: pytest.fail("it began"))
    with records.locked(tmp_path):
        done = call("check", "--device", "cpu", "--output", tmp_path)
    sentence = f"crossbn: another process works in {tmp_path}: wait for it, or take another --output\n"
    assert (done.status, done.errors) == (1, sentence)
    (tmp_path / "records.jsonl").write_text("{")
    done = call("check", "--device", "cpu", "--output", tmp_path)
    assert done.status == 1
    assert "is not a record of crossbn's; take the line out" in done.errors


def test_no_such_device() -> None:
    done = call("check", "--device", "abacus")
    assert done.status == 2
    assert "there is no device 'abacus'" in done.errors
