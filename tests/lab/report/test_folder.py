"""Records of every command, as sections of a page."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from crossbn.lab.cost.records import CostRecord
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.records import append_record
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.experiments.tasks import Task
from crossbn.lab.records import RecordError, append_lines
from crossbn.lab.report.experiment_figures import FIGURES
from crossbn.lab.report.folder import make_page
from crossbn.lab.report.page import Page, Section
from tests.lab.cost import handmade as costs
from tests.lab.experiments import pretended
from tests.lab.experiments.handmade import record, run, three_norms
from tests.lab.report import on_disk
from tests.lab.report.test_svg import panels


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "pretended", pretended)
    monkeypatch.setitem(FIGURES, "pretended", lambda results: panels(len(results)))


def only_section(folder: Path) -> Section:
    page = make_page(folder)
    assert page.problems == []
    (section,) = page.sections
    return section


def test_every_command_has_its_section(tmp_path: Path) -> None:
    on_disk.write_all(tmp_path)
    page = make_page(tmp_path)
    assert [section.title for section in page.sections] == [
        "BN, GN and CBN side by side at batch size 2",
        "Numbers out of thin air (small scale)",
        "Trainings",
        "Costs: time, memory and FLOPs",
        "How close remembered statistics of tiny are to the true ones",
    ]
    assert (page.title, page.problems) == (f"Results in {tmp_path.name}", [])
    assert page.lead == [f"{9 + 4 + 4 + 6 + 16} records in 8 files."]
    assert page.command == ["crossbn", "report", str(tmp_path)]


def test_results_are_in_the_order_of_the_table_with_the_paper_s_numbers(tmp_path: Path) -> None:
    on_disk.write_results(tmp_path / "pretended-small.jsonl")
    section = only_section(tmp_path)
    (table,) = section.tables
    assert table.title == "Mean ± standard deviation over seeds, n = 2"
    assert table.rows == (("one", "1.50 ± 0.71", "2 ± 2", ""), ("two", "2.50 ± 0.71", "6 ± 4", "4"))
    assert (section.notes, section.findings) == (["Made up, small."], [])
    assert [len(figure.axes) for figure in section.figures] == [4]
    assert section.setting_tables[0].rows == (("one", "1"), ("two", "2"))
    assert section.settings == {
        "Software": "torch 2.6",
        "Commit": "abc1234",
        "Machine": "processor abacus",
        "Records": "4 in pretended-small.jsonl",
        "Computing time": "6 min",
    }
    assert section.command == ["crossbn", "reproduce", "pretended", "--scale", "small", "--out", str(tmp_path)]


def test_the_later_of_two_results_counts_and_missing_runs_are_named(tmp_path: Path) -> None:
    task = pretended.configs(Scale.FULL)[0]
    append_lines(tmp_path / "any name.jsonl", [on_disk.result(task, 7.0), on_disk.result(task, 9.0)])
    section = only_section(tmp_path)
    assert section.title == "Numbers out of thin air (full scale)"
    assert section.tables[0].title == "One run each (n = 1)"
    assert section.tables[0].rows == (("one", "9.00", "81"),)
    assert section.findings == ["Not finished: two still to be run."]
    assert section.settings["Number"] == "100"


@pytest.mark.parametrize(
    ("name", "title", "notes"),
    [("pretended-full", "Numbers out of thin air (full scale)", 2), ("other", "Numbers out of thin air", 1)],
)
def test_runs_with_other_settings_are_shown_and_said_to_be_so(
    tmp_path: Path, name: str, title: str, notes: int
) -> None:
    append_lines(tmp_path / f"{name}.jsonl", [on_disk.result(Task("pretended", "one", 0, {"number": 5}), 5.0)])
    section = only_section(tmp_path)
    assert section.title == title
    assert len(section.notes) == notes
    assert "other settings than this version" in section.notes[-1]


def test_tables_that_share_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete table explains its runs; of another one that has some of them nothing is shown until it has more."""

    class Larger:
        TITLE, MEASURES, ALONE = "Larger", pretended.MEASURES, False
        rows, notes = staticmethod(pretended.rows), staticmethod(pretended.notes)

        @staticmethod
        def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
            return [*pretended.configs(scale, seeds), Task("pretended", "three", 0, {"number": 3})]

    monkeypatch.setitem(EXPERIMENTS, "larger", Larger)
    path = tmp_path / "pretended-small.jsonl"
    on_disk.write_results(path, seeds=1)
    assert [section.title for section in make_page(tmp_path).sections] == ["Numbers out of thin air (small scale)"]
    append_lines(path, [on_disk.result(Task("pretended", "three", 0, {"number": 3}), 3.0)])
    page = make_page(tmp_path)
    assert [section.title for section in page.sections][-1] == "Larger (small scale)"
    assert [row[0] for row in page.sections[-1].tables[0].rows] == ["one", "two", "three"]


def test_a_file_has_a_section_for_each_demo(tmp_path: Path) -> None:
    for each in three_norms():
        append_record(tmp_path / "records.jsonl", each)
    other = record(0.2, 0.3, norm="cbn")
    append_record(tmp_path / "records.jsonl", replace(other, run=run(window=4)))
    longer = replace(other.run, settings={**other.run.settings, "epochs": 9})
    append_record(tmp_path / "records.jsonl", replace(other, run=longer))
    first, second, third = make_page(tmp_path).sections
    assert [row[:2] for row in first.tables[0].rows] == [
        ("BN at batch 32", ""),
        ("BN at batch 2", ""),
        ("CBN at batch 2", "4"),
    ]
    assert second.tables[0].rows[-1] == ("CBN at batch 2", "8", "3", "94.0 ± 1.0", "3.0")
    assert second.findings[0].startswith("CBN at batch 2, with a window of 8, classified 94.0% of 200 test images")
    assert second.command == [
        *("crossbn", "demo", "--batch-size", "2", "--window", "8", "--seeds", "3"),
        *("--epochs", "2", "--train-images", "40", "--out", str(tmp_path)),
    ]
    assert (third.settings["Epochs"], third.findings) == ("9", [])
    assert {each.title for each in (first, second, third)} == {
        "BN, GN and CBN side by side at batch size 2: records.jsonl"
    }


def test_trainings_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    on_disk.write_trainings(tmp_path)
    fast = on_disk.training("cbn", 0, 0.2, 0.3, learning_rate_used=0.1)
    (tmp_path / "again.jsonl").write_text(json.dumps(fast) + "\n")
    section = only_section(tmp_path)
    assert section.tables[0].rows == (
        ("CBN, learning rate 0.1", "1", "30.0", "30.0", "40.0", "1.500", "60"),
        ("BN, learning rate 0.00625", "2", "42.0 ± 2.8", "42.0 ± 2.8", "52.0 ± 2.8", "1.500 ± 0.000", "60 ± 0"),
        ("CBN, learning rate 0.00625", "2", "49.0 ± 1.4", "49.0 ± 1.4", "59.0 ± 1.4", "1.500 ± 0.000", "60 ± 0"),
    )
    assert section.settings["Batch size"] == "2"
    assert section.settings["Computing time"] == "5 min"
    assert section.setting_tables[0].columns == ("run", "norm", "window", "learning rate")
    assert section.setting_tables[0].rows[1] == ("BN, learning rate 0.00625", "bn", "", "0.00625")
    test, _, loss = section.figures[0].axes
    assert numpy.asarray(test.lines[2].get_ydata()) == pytest.approx([10.0, 49.0])
    assert numpy.asarray(loss.lines[0].get_ydata()) == pytest.approx([2.0, 1.5])


def test_a_training_that_diverged_is_shown(tmp_path: Path) -> None:
    lost = on_disk.training("bn", 1, 0.1, 0.1)
    lost["curve"][-1]["train_loss"] = float("nan")
    lines = [json.dumps(each) for each in (on_disk.training("bn", 0, 0.2, 0.4), lost)]
    (tmp_path / "record.jsonl").write_text("\n".join(lines))
    section = only_section(tmp_path)
    assert section.title == "Training: BN"
    assert section.tables[0].rows[0][1:3] == ("2", "25.0 ± 21.2")
    assert section.tables[0].rows[0][5] == "nan ± nan"
    assert "Training: BN" in Page("Diverged", [section]).html()


def test_costs_of_several_cases_have_an_overview_and_a_picture(tmp_path: Path) -> None:
    on_disk.write_costs(tmp_path / "records.jsonl")
    section = only_section(tmp_path)
    overview, first, second = section.tables
    assert overview.columns[0] == "CBN / BN"
    assert [row[:2] for row in overview.rows] == [
        ("tiny, input 3x6x6, batch 2, window 3", "1.25 ± 0.01"),
        ("tiny, input 3x6x6, batch 2, window 6", "1.50 ± 0.01"),
    ]
    assert (first.title, second.rows[1][3]) == ("tiny, input 3x6x6, batch 2, window 3", "1.50 ± 0.01")
    (figure,) = section.figures
    assert [axes.get_xlabel() for axes in figure.axes] == ["Window, steps"]
    assert section.settings["Repetitions"] == "20 rounds"
    assert section.settings["Norms"] == "bn, gn, cbn"


def test_one_case_is_named_in_the_title_and_a_lost_baseline_in_the_problems(tmp_path: Path) -> None:
    whole, lost = costs.records(costs.case()), costs.records(costs.case(batch_size=5))[1:]
    append_lines(tmp_path / "records.jsonl", [*whole, *lost])
    page = make_page(tmp_path)
    (section,) = page.sections
    assert section.title == "Costs: time, memory and FLOPs of tiny, input 3x6x6, batch 2, window 3"
    assert (len(section.tables), section.figures) == (1, [])
    assert page.problems == ["records.jsonl lacks BN's record to compare with: tiny, input 3x6x6, batch 5, window 3."]


def test_targets_are_in_brackets(tmp_path: Path) -> None:
    def made(**changes: object) -> list[CostRecord]:
        case = costs.case(model="resnet18", input_shape=(3, 224, 224), batch_size=4, window=4, **changes)
        return costs.records(case, cbn=1.05)

    append_lines(tmp_path / "records.jsonl", [*made(norms=("bn", "cbn")), *made(norms=("bn", "cbn"), positions=None)])
    overview = only_section(tmp_path).tables[0]
    assert overview.columns[0] == "CBN / BN (target)"
    assert [row[1] for row in overview.rows] == ["1.05 ± 0.01 (1.10)", "1.05 ± 0.01"]


def test_diagnosis_has_its_context_and_a_recommendation(tmp_path: Path) -> None:
    on_disk.write_diagnosis(tmp_path / "here")
    section = only_section(tmp_path)
    assert section.findings[0].startswith(
        "Too little was measured to rely on: 2 measurements where it takes 4. So far: window 3 serves: even at age 2 "
    )
    assert [table.title for table in section.tables] == [
        "By age of the statistics",
        "By progress of the training",
        "By layer",
    ]
    assert section.tables[0].rows[0][1:3] == ("20.0 → 10.0", "50.0")
    assert section.settings == {
        "Measurements": "2, each of all layers and ages",
        "Model": "tiny",
        "Window": "3",
        "Burn-in": "0",
        "Processor": "abacus",
        "Software": "torch 2.6",
        "Records": "16 in here/records.jsonl",
    }
    (tmp_path / "here" / "context.json").unlink()
    bare = only_section(tmp_path)
    assert bare.title == "How close remembered statistics are to the true ones"
    assert bare.findings == section.findings


def test_what_does_not_fit_together_is_named(tmp_path: Path) -> None:
    on_disk.write_demo(tmp_path / "demo")
    paper = tmp_path / "paper.jsonl"
    broken = replace(on_disk.result(pretended.configs(Scale.SMALL)[0], 1.0), values={})
    unknown = on_disk.result(Task("future", "one", 0, {}), 1.0)
    append_lines(paper, [broken, unknown])
    page = make_page(tmp_path)
    assert [section.title for section in page.sections] == ["BN, GN and CBN side by side at batch size 2"]
    assert page.problems == [
        "paper.jsonl has records that fit together to no table of this version of crossbn (KeyError: 'number').",
        "paper.jsonl has results of 'future', of which this version of crossbn has no table.",
    ]


def test_values_of_another_type_are_named(tmp_path: Path) -> None:
    on_disk.write_results(tmp_path / "pretended-small.jsonl")
    costly = json.loads(costs.records(costs.case())[0].to_json())
    (tmp_path / "cost.jsonl").write_text(json.dumps({**costly, "norm": ["bn"]}))
    nameless = Task("pretended", None, 0, {})  # type: ignore[arg-type]
    append_lines(tmp_path / "nameless.jsonl", [on_disk.result(nameless, 1.0)])
    page = make_page(tmp_path)
    assert len(page.sections) == 1
    assert page.problems == [
        "nameless.jsonl has records that fit together to no table of this version of crossbn (TypeError: a name is no "
        "text).",
        "cost.jsonl has records that fit together to no table of this version of crossbn (TypeError: unhashable type: "
        "'list').",
    ]


def test_nothing_found(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no records to report\. It has no file that ends in \.jsonl\."):
        make_page(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(RecordError, match=r"no records to report\. a\.jsonl is empty\. And 1 more\."):
        make_page(tmp_path)
