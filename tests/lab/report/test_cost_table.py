from dataclasses import replace

from crossbn.lab.cost.suites import Goal
from crossbn.lab.report.cost_table import caption, case_table, suite_table
from crossbn.lab.report.table import Table
from tests.lab.cost.handmade import case, records, timing


def test_case_by_hand() -> None:
    table = case_table(records(case(), gn=1.1, cbn=1.25))
    assert table.title == "tiny, input 3x6x6, batch 2, window 3"
    assert table.columns == ("", "BN", "GN", "CBN")
    assert table.rows == (
        ("training step, ms", "10", "11", "12.5"),
        ("… relative to BN", "1", "1.10 ± 0.01", "1.25 ± 0.01"),
        ("burn-in step, ms", "", "", "10.2"),
        ("… relative to BN", "", "", "1.02 ± 0.01"),
        ("inference, ms", "10", "10", "10"),
        ("… relative to BN", "1", "1.00 ± 0.00", "1.00 ± 0.00"),
        ("folded inference, ms", "9", "", "9"),
        ("… relative to BN", "1", "", "0.90 ± 0.00"),
        ("peak memory, MB", "1", "1", "1.1"),
        ("… relative to BN", "1.000", "1.000", "1.100"),
        ("of it history, MB", "0", "0", "0.2"),
        ("network forward, MFLOP", "3", "3", "3"),
        ("norms forward, MFLOP", "0.04", "0.04", "0.04"),
        ("network backward, MFLOP", "6", "6", "6"),
        ("norms backward, MFLOP", "0.05", "0.05", "0.05"),
    )


def test_measures_that_nobody_has_take_no_room() -> None:
    rows = case_table(records(case(norms=("bn",)))).rows
    assert not any(row[0].startswith("burn-in") for row in rows)
    assert len(rows) == 13


def test_large_numbers_are_written_out() -> None:
    table = case_table([replace(records(case())[0], peak_bytes=1_234_567_890)])
    assert ("peak memory, MB", "1,235") in table.rows


def test_suite_has_targets_in_brackets() -> None:
    first, second = case(norms=("bn", "cbn")), case(norms=("bn", "cbn"), batch_size=4)
    goals = [Goal(first, {"train": 1.2, "history": 2.0}), Goal(second, {})]
    made = records(first, cbn=1.25) + records(second, cbn=1.3)
    table = suite_table(goals, made)
    assert table.rows == (
        (
            "tiny, input 3x6x6, batch 2, window 3",
            "1.25 ± 0.01 (1.20)",
            "1.02 ± 0.01",
            "1.00 ± 0.00",
            "0.90 ± 0.00",
            "2.00 (2.00)",
            "1.10",
        ),
        (
            "tiny, input 3x6x6, batch 4, window 3",
            "1.30 ± 0.01",
            "1.02 ± 0.01",
            "1.00 ± 0.00",
            "0.90 ± 0.00",
            "2.00",
            "1.10",
        ),
    )
    compiled = [replace(record, compiled=True) for record in made[:2]]
    assert suite_table(goals[:1], made[:2] + compiled).rows[1][0].endswith("window 3, compiled")


def test_folded_inference_stands_beside_gns_where_that_has_a_target() -> None:
    first, second = case(), case(batch_size=4)
    bn, gn, cbn = records(first, cbn=1.25)
    cbn = replace(cbn, timings={**cbn.timings, "folded_to_gn": timing(0.9, 0.01)})
    goals = [Goal(first, {"folded_to_gn": 1.0}), Goal(second, {})]
    table = suite_table(goals, [bn, gn, cbn, *records(second)])
    assert table.columns[-1] == "folded / GN's inference"
    assert [row[-1] for row in table.rows] == ["0.90 ± 0.01 (1.00)", ""]


def test_markdown_and_parts() -> None:
    table = Table("title", ("", "a", "b", "c"), (("row", "1", "2", "3"),))
    assert table.markdown() == "### title\n\n|  | a | b | c |\n| --- | ---: | ---: | ---: |\n| row | 1 | 2 | 3 |"
    assert table.cut(2) == [
        Table("title", ("", "a", "b"), (("row", "1", "2"),)),
        Table("title", ("", "c"), (("row", "3"),)),
    ]
    assert table.cut(3) == [table]


def test_caption_says_what_with() -> None:
    made = records(case())
    made[0].environment.update(commit="abc1234", machine={"processor": "abacus"})  # type: ignore[attr-defined]
    text = caption(made)
    assert "20 rounds, threads 1, device cpu; crossbn 0.1.0, torch " in text
    assert text.endswith("commit abc1234, processor abacus.")
    rounds = {name: replace(timing, rounds=35) for name, timing in made[0].timings.items()}
    assert "20 to 35 rounds" in caption([made[1], replace(made[0], timings=rounds)])
