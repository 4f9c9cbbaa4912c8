import pytest

from crossbn.lab.experiments.demo import configs, findings, rows
from tests.lab.experiments.handmade import record, three_norms


def kinds(**options: int) -> list[tuple[str, int, int]]:
    return [(run.norm, run.batch_size, run.window) for run in configs(seeds=1, **options)]


def test_default_runs() -> None:
    assert kinds() == [("bn", 32, 1), ("bn", 2, 1), ("gn", 2, 1), ("cbn", 2, 8)]
    runs = configs()
    assert len(runs) == 12
    assert len({(run.name, run.seed) for run in runs}) == 12


def test_learning_rate_is_proportional_to_the_batch_size() -> None:
    ceiling, *rest = configs(seeds=1, batch_size=4)
    assert {run.settings["learning_rate"] for run in rest} == {ceiling.settings["learning_rate"] / 8}


def test_no_run_twice_and_none_that_cannot_be_done() -> None:
    assert kinds(batch_size=32) == [("bn", 32, 1), ("gn", 32, 1), ("cbn", 32, 1)]
    assert kinds(batch_size=1, window=16) == [("bn", 32, 1), ("gn", 1, 1), ("cbn", 1, 16)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_images": 31}, "31 training images do not fill a batch of 32"),
        ({"batch_size": 64, "train_images": 40}, "40 training images do not fill a batch of 64"),
        ({"batch_size": 1, "window": 1}, "a single value per channel"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    ],
)
def test_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs(**options)


def test_rows_are_in_the_order_of_the_runs() -> None:
    assert [row.name for row in rows(three_norms())] == ["BN at batch 32", "BN at batch 2", "CBN at batch 2"]


def test_findings_follow_from_the_numbers() -> None:
    result, certainty = findings(rows(three_norms()))
    assert result == (
        "CBN at batch 2, with a window of 8, classified 94.0% of 200 test images correctly: "
        "1.0 points below BN at batch 32 and 53.0 points above BN at batch 2."
    )
    # The standard errors are sqrt(0.01^2 + 0.01^2) / sqrt(3) = 0.8 points and 2.4 points.
    assert certainty == (
        "Over 3 seeds, CBN's distance to BN at batch 2 is more than twice its standard error; "
        "CBN's distance to BN at batch 32 is less than twice its standard error and may be chance."
    )


def test_findings_of_one_seed_claim_nothing() -> None:
    result, certainty = findings(rows([record(0.5), record(0.5, norm="bn")]))
    assert "level with BN at batch 2" in result
    assert certainty == "One seed cannot tell a difference from chance."
