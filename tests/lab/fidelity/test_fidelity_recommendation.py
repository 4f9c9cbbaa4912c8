"""Recommendations and averages of records with chosen numbers."""

import json
import re
from pathlib import Path

import pytest

from crossbn.lab import records
from crossbn.lab.fidelity import SAME_LAYER, WHOLE_NETWORK, CauseRecord, Fidelity, FidelityRecord, read, recommend
from crossbn.lab.fidelity.recommendation import verdict
from crossbn.lab.fidelity.records import average_causes, by_age, by_layer, by_progress, found_values
from crossbn.lab.records import Record, RecordError, append


def record(
    step: int, age: int, error: float, noise: float = 0.2, layer: str = "bn1", channels: int = 8
) -> FidelityRecord:
    found = Fidelity(channels, 0.1, 0.05, 2 * error, error, noise, 0.0)
    return FidelityRecord(step, layer, age, WHOLE_NETWORK, found)


def training(*errors_by_age: list[float]) -> list[FidelityRecord]:
    """One list for each measurement, every 10 steps."""
    return [
        record(10 * i, age, error)
        for i, errors in enumerate(errors_by_age, start=1)
        for age, error in enumerate(errors, start=1)
    ]


@pytest.mark.parametrize(
    ("errors", "window", "burn_in", "expected"),
    [
        (
            [[0.1, 0.1, 0.1]] * 4,
            4,
            0,
            (4, 0, "Window 4 serves: even at age 3 .*10.0% off.*20.0%.*no burn-in is needed"),
        ),
        ([[0.1, 0.1, 0.3]] * 4, 4, 0, (3, 0, "Window 3 instead of 4: at age 3 .*30.0% off.*no burn-in is needed")),
        # Beyond the first age that fails nothing counts.
        ([[0.1, 0.3, 0.1]] * 4, 4, 0, (2, 0, "Window 2 instead of 4: at age 2 ")),
        ([[0.3, 0.3, 0.3]] * 4, 4, 0, (1, 0, "Window 1, plain BatchNorm, or a lower learning rate: at age 1 ")),
        # Early measurements decide on the burn-in only.
        ([[0.5], [0.5], [0.1], [0.1], [0.1]], 2, 0, (2, 30, "Window 2 serves.*a burn-in of 30 steps would let")),
        ([[0.1], [0.5], [0.1], [0.1]], 2, 0, (2, 30, "a burn-in of 30 steps")),
        ([[0.1], [0.1], [0.1], [0.1]], 2, 5, (2, 5, "the burn-in of 5 steps is long enough")),
        ([[0.1, 0.9], [0.1, 0.9], [0.1, 0.9], [0.1, 0.9]], 3, 0, (2, 0, "no burn-in is needed")),
        # An advice for the window is not withdrawn because the errors fall, nor one that the last measurements share.
        ([[0.1], [0.1], [0.1], [0.01]], 2, 0, (2, 0, "^Window 2 serves")),
        ([[0.1, 0.9], [0.1, 0.9], [0.1, 0.9], [0.1, 0.3]], 3, 0, (2, 0, "^Window 2 instead of 3")),
    ],
)
def test_rules(errors: list[list[float]], window: int, burn_in: int, expected: tuple[int, int, str]) -> None:
    found = recommend(training(*errors), window, burn_in)
    assert (found.window, found.burn_in) == expected[:2]
    assert re.search(expected[2], str(found))
    assert found.sentence.endswith(".")
    assert found.trusted


@pytest.mark.parametrize(
    ("errors", "window", "burn_in", "expected"),
    [
        ([[0.3]], 2, 0, (1, "1 measurement where it takes 4. So far: window 1, plain BatchNorm, or a lower")),
        ([[0.1]] * 3, 2, 0, (2, "3 measurements where it takes 4. So far: window 2 serves: even at age 1 ")),
        # Forty steps are ten windows of four, not of five, nor with a burn-in.
        ([[0.1, 0.1, 0.1, 0.3]] * 4, 5, 0, (4, "40 steps where a window of 5 takes 50. So far: window 4 instead of 5")),
        ([[0.1, 0.1, 0.1]] * 4, 4, 1, (4, "39 steps where a window of 4 takes 40. So far: window 4 serves")),
        ([[0.1, 0.1]] * 4, 4, 0, (3, "no statistics older than 2 steps where a window of 4 has 3. So far: window 3 ")),
        # All of the later half is against pooling, the last quarter is not.
        (
            [[0.9], [0.9], [0.9], [0.1]],
            2,
            0,
            (1, "the network still settles, and its last measurements alone speak for window 2. So far: window 1, "),
        ),
    ],
)
def test_too_little_is_said_to_be_so(
    errors: list[list[float]], window: int, burn_in: int, expected: tuple[int, str]
) -> None:
    found = recommend(training(*errors), window, burn_in)
    assert not found.trusted
    assert found.window == expected[0]
    assert found.sentence.startswith(f"Too little was measured to rely on: {expected[1]}")
    assert "burn-in" not in found.sentence
    assert found.sentence.endswith(".")


def test_the_same_layer_does_not_count() -> None:
    found = Fidelity(8, 0.1, 0.05, 0.2, 0.1, None, 0.0)
    with pytest.raises(ValueError, match="no layer was compared with the whole network"):
        recommend([FidelityRecord(10, "bn1", 1, SAME_LAYER, found)], window=2)


def test_averages_count_channels() -> None:
    records = [record(10, 2, 0.4, channels=1), record(10, 1, 0.1, layer="bn2"), record(20, 2, 0.1, channels=3)]
    ages = {age: found[WHOLE_NETWORK].compensated_var_error for age, found in by_age(records).items()}
    assert list(ages) == [1, 2]
    assert ages == pytest.approx({1: 0.1, 2: 0.175})
    assert list(by_layer(records)) == ["bn1", "bn2"]
    assert by_age(records)[2][WHOLE_NETWORK].explained_var == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("parts", "expected"), [(None, [10, 20, 30, 40, 50]), (2, [10, 40]), (3, [10, 30, 50]), (9, [10, 20, 30, 40, 50])]
)
def test_progress_in_parts(parts: int | None, expected: list[int]) -> None:
    records = training(*[[0.1]] * 5)
    assert list(by_progress(records, parts)) == expected


def test_a_run_survives_the_file(tmp_path: Path) -> None:
    path, found = tmp_path / "records.jsonl", training([0.1, 0.2], [0.3, 0.4])
    run = Record("diagnose", "tiny", 0, {"window": 3}, found_values(found, CAUSED, {"bn9": "it does not run"}))
    append(path, [run, run])
    assert read(path) == 2 * found
    (first, _) = records.read(path)
    assert CauseRecord.of(first) == CAUSED
    assert first.values["left_out"] == {"bn9": "it does not run"}
    path.write_text("{}\n")
    with pytest.raises(RecordError, match=f"line 1 of {path} is not a record"):
        read(path)


def test_lines_of_one_layer_and_age_are_read(tmp_path: Path) -> None:
    """As they were written before."""
    errors = {"naive_mean_error": 0.1, "compensated_mean_error": 0.05, "naive_var_error": 0.2}
    errors |= {"compensated_var_error": 0.1, "invalid": 0.0, "explained_mean": 0.5, "explained_var": 0.5}
    line = {"step": 10, "layer": "bn1", "age": 2, "truth": "same layer", "channels": 8, **errors, "batch_noise": None}
    path = tmp_path / "records.jsonl"
    path.write_text(f"{json.dumps(line)}\n")
    assert read(path) == [FidelityRecord(10, "bn1", 2, SAME_LAYER, Fidelity(8, 0.1, 0.05, 0.2, 0.1, None, 0.0))]


CAUSED = [
    CauseRecord(10, f"bn{layer}", 1, cause, 8, layer / 100, round(error + layer / 100, 2))
    for layer in range(5)
    for cause, error in {"own weights": 0.1, "weights before": 0.2, "norms before": 0.3, "all": 0.5}.items()
]


def test_causes_by_depth() -> None:
    assert list(average_causes(CAUSED)) == ["bn0", "bn1", "bn2", "bn3", "bn4"]
    assert average_causes(CAUSED)["bn3"]["own weights"] == pytest.approx((0.03, 0.13))
    halves = average_causes(CAUSED, parts=2)
    assert list(halves) == ["bn0 to bn2", "bn3 to bn4"]
    assert halves["bn3 to bn4"]["all"] == pytest.approx((0.035, 0.535))
    assert list(average_causes(CAUSED, parts=9)) == list(average_causes(CAUSED))


def test_verdict_names_the_largest_cause() -> None:
    found = verdict(training(*[[0.1]] * 4), CAUSED, window=2)
    assert found.startswith("Window 2 serves: ")
    expected = "Remembered variances are 52.0% off those that the same images have in one large batch, mostly because "
    assert found.endswith(f"{expected}the norms before pooled other batches then (32.0%).")
    assert verdict([], [], window=2).startswith("No recommendation: there is nothing to recommend from")
