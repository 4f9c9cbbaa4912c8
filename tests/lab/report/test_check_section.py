from pathlib import Path

import pytest

from tests.lab.report import on_disk
from tests.lab.report.sections import only_section


@pytest.mark.parametrize(("passed", "word"), [(True, "right"), (False, "wrong"), (None, "-")])
def test_a_check_begins_with_its_verdict(tmp_path: Path, passed: bool | None, word: str) -> None:
    on_disk.write(tmp_path / "records.jsonl", [on_disk.checked(passed)])
    section = only_section(tmp_path)
    assert section.findings == ["All is right on cpu."]
    assert section.tables[0].rows == (("operators", word, "12 of 12 agree."),)
    assert section.settings["Machine"] == "processor abacus"
    assert section.command == ["crossbn", "check", "--device", "cpu"]
