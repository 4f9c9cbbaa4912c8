"""Records of every command on one page."""

from pathlib import Path

import pytest

from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.records import Record, RecordError
from crossbn.lab.report.folder import SECTIONS, TABLE, kind_of, make_page
from tests.lab.cost import handmade as costs
from tests.lab.experiments import pretended
from tests.lab.report import on_disk


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "pretended", pretended)


def test_every_command_has_its_section(tmp_path: Path) -> None:
    on_disk.write_all(tmp_path)
    page = make_page(tmp_path)
    assert [section.title for section in page.sections] == [
        "BN, GN and CBN side by side at batch size 2",
        "Numbers out of thin air (small scale)",
        "Trainings",
        "Costs: time, memory and FLOPs",
        "How close remembered statistics of tiny are to the true ones",
        "Whether the norms are right and fast on cpu",
    ]
    assert (page.title, page.problems) == (f"Results in {tmp_path.name}", [])
    assert page.lead == [f"{9 + 4 + 4 + 6 + 16 + 1} records in 9 files."]
    assert page.command == ["crossbn", "report", tmp_path.name], "no path of this machine"


def test_no_section_has_a_setting_that_is_not_set_or_a_path_of_this_machine(tmp_path: Path) -> None:
    on_disk.write_all(tmp_path)
    source = make_page(tmp_path).html()
    assert "not set" not in source
    assert str(tmp_path) not in source


def test_a_kind_is_one_entry() -> None:
    assert kind_of(on_disk.three_norms()[0]) == "demo"
    assert (
        kind_of(Record("classification", "", 0, {}, {}, {})) == kind_of(Record("gradients", "", 0, {}, {}, {})) == TABLE
    )
    assert kind_of(on_disk.cost(costs.records(costs.case())[0])) == "cost"
    assert kind_of(Record("cost", "resnet18", 0, {}, {"norms": []}, {})) == TABLE  # of `reproduce cost`
    assert list(SECTIONS) == ["demo", TABLE, "detect", "classify", "cost", "diagnose", "check"]


def test_what_does_not_fit_together_is_named(tmp_path: Path) -> None:
    on_disk.write_demo(tmp_path / "demo")
    broken = Record("pretended", "one", 0, {"number": 1}, {}, on_disk.MADE)
    unknown = on_disk.result("one", 0, {}, 1.0, kind="future")
    on_disk.write(tmp_path / "paper.jsonl", [broken, unknown])
    page = make_page(tmp_path)
    assert [section.title for section in page.sections] == ["BN, GN and CBN side by side at batch size 2"]
    assert page.problems == [
        "paper.jsonl has records that fit together to no table of this version of crossbn (KeyError: 'number').",
        "paper.jsonl has results of 'future', of which this version of crossbn has no table.",
    ]


def test_values_of_another_type_are_named(tmp_path: Path) -> None:
    on_disk.write_results(tmp_path / "pretended-small.jsonl")
    costly = on_disk.cost(costs.records(costs.case())[0])
    odd = Record("cost", "", 0, {**costly.settings, "norm": ["bn"]}, costly.values, on_disk.MADE)
    on_disk.write(tmp_path / "cost.jsonl", [odd])
    on_disk.write(tmp_path / "nameless.jsonl", [on_disk.result(None, 0, {}, 1.0)])  # type: ignore[arg-type]
    page = make_page(tmp_path)
    assert len(page.sections) == 1
    reason = "has records that fit together to no table of this version of crossbn"
    assert page.problems == [
        f"nameless.jsonl {reason} (TypeError: a name is no text).",
        f"cost.jsonl {reason} (TypeError: unhashable type: 'list').",
    ]


def test_nothing_found(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no records to report\. It has no file that ends in \.jsonl\."):
        make_page(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(RecordError, match=r"no records to report\. a\.jsonl is empty\. And 1 more\."):
        make_page(tmp_path)
