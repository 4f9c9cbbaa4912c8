from pathlib import Path

import pytest

from crossbn.cli import extras
from crossbn.lab.experiments.registry import EXPERIMENTS
from tests.cli.answers import call
from tests.lab.experiments import pretended
from tests.lab.report import on_disk
from tests.lab.report.reader import Reader

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_folder_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "pretended", pretended)
    on_disk.write_all(tmp_path)
    answer = call("report", tmp_path)
    assert (answer.status, answer.errors) == (0, "")
    first, *others = answer.output.splitlines()
    assert first == f"{tmp_path / 'report.html'} shows:"
    assert others[0] == "- BN, GN and CBN side by side at batch size 2"
    assert len(others) == 6
    assert all(line.startswith("- ") for line in others)
    reader = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert (reader.tags["table"], reader.tags["figure"], reader.open) == (15, 4, [])
    for number in ("94.0 ± 1.0", "2.50 ± 0.71", "49.0 ± 1.4", "1.50 ± 0.01", "20.0 → 10.0"):
        assert number in reader.text


def test_output_and_title(tmp_path: Path) -> None:
    on_disk.write_demo(tmp_path / "demo")
    answer = call("report", tmp_path / "demo", "--out", tmp_path / "new" / "here.html", "--title", "My <tests>")
    assert answer.status == 0, answer.errors
    reader = Reader((tmp_path / "new" / "here.html").read_text(encoding="utf-8"))
    assert reader.text.startswith("My <tests> My <tests> 9 records in 1 file.")
    assert "--title 'My <tests>'" in reader.text
    assert not (tmp_path / "demo" / "report.html").exists()


def test_what_is_left_out_is_said_here_and_on_the_page(tmp_path: Path) -> None:
    on_disk.write_demo(tmp_path / "demo")
    with (tmp_path / "demo" / "records.jsonl").open("a") as file:
        file.write('{"experiment": "de')
    (tmp_path / "log.jsonl").write_text("[]\n")
    answer = call("report", tmp_path)
    assert answer.status == 0
    sentences = [
        "Line 10 of demo/records.jsonl cannot be read: no whole record of crossbn's.",
        "log.jsonl is not a file of crossbn's records.",
    ]
    assert answer.errors.splitlines() == [f"crossbn: {sentence}" for sentence in sentences]
    text = Reader((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert f"Left out {' '.join(sentences)}" in text


def test_records_in_the_repository_make_a_page(tmp_path: Path) -> None:
    answer = call("report", BENCHMARKS, "--out", tmp_path / "page.html")
    assert (answer.status, answer.errors) == (0, "")
    text = Reader((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "CBN / BN (target)" in text
    assert "targets/records.jsonl" in text
    first = [text.index(heading) for heading in ("Accuracy by batch size", "Detection: norms", "CBN / BN (target)")]
    assert first == sorted(first)  # accuracy, then detection, then what it costs


@pytest.mark.parametrize(
    ("words", "complaint"),
    [((), "DIR"), (("nowhere",), "nowhere"), ((__file__,), "is a file"), ((".", "--colour"), "--colour")],
)
def test_usage_errors(words: tuple[str, ...], complaint: str) -> None:
    answer = call("report", *words)
    assert (answer.status, answer.output) == (2, "")
    assert complaint in answer.errors.splitlines()[-1]


def test_other_mistakes_end_with_a_sentence(tmp_path: Path) -> None:
    answer = call("report", tmp_path)
    sentence = f"crossbn: {tmp_path} has no records to report. It has no file that ends in .jsonl.\n"
    assert (answer.status, answer.output, answer.errors) == (1, "", sentence)
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert call("report", tmp_path).errors.endswith(
        "has no records to report. a.jsonl is not a file of crossbn's records.\n"
    )
    on_disk.write_demo(tmp_path / "demo")
    answer = call("report", tmp_path, "--out", tmp_path / "a.jsonl" / "page.html")
    assert answer.status == 1
    assert answer.errors == f"crossbn: File exists: {tmp_path / 'a.jsonl'}\n"


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "matplotlib" else name)
    answer = call("report", tmp_path)
    assert answer.status == 1
    assert "needs matplotlib: pip install '.[demo]'" in answer.output
