from collections.abc import Iterable
from pathlib import Path

import pytest

from crossbn.lab.experiments.classification import KIND, recipe_of
from crossbn.lab.experiments.experiment import Scale, UnavailableError
from crossbn.lab.experiments.rates import (
    CHOSEN,
    FACTORS,
    FINETUNE,
    LEARNING_RATE,
    TUNED,
    TUNED_DATA,
    TUNED_NORMS,
    medium_norms,
)
from crossbn.lab.experiments.tables import TABLES
from crossbn.lab.records import Task, by_name, of_cells, read
from tests.lab.experiments.classified import by_norm, result, results_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks/reproduce"
MEDIUM_NORMS = list(medium_norms(2))


def names(tasks: Iterable[Task]) -> list[str]:
    return list(dict.fromkeys(task.name for task in tasks))


def test_all_tables_are_there() -> None:
    assert set(TABLES) == {
        *(
            "norms",
            "batch_size",
            "architectures",
            "window",
            "compensation",
            "burn_in",
            "order",
            "backward",
            "positions",
        ),
        *("bound", "depth", "weights", "activations", "improvements", "learning_rate", "finetune"),
    }


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name in TABLES for scale in TABLES[name].scales])
def test_a_table_shows_each_of_its_runs_and_ignores_others(name: str, scale: Scale) -> None:
    table = TABLES[name]
    own = results_of(table, by_norm, scale=scale)
    others = results_of(TABLES["norms"], by_norm, scale=scale) + results_of(TABLES["bound"], by_norm, scale=scale)
    rows = table.rows([*others, *own])
    assert [row.name for row in rows] == [row.name for row in table.rows(own)]
    shown = {measure.name for measure in table.measures}
    assert rows
    assert all(row.ours and row.ours.keys() <= shown for row in rows)
    assert table.rows([]) == []


def test_tables_share_their_runs() -> None:
    done = set(names(TABLES["batch_size"].configs(Scale.SMALL)))
    assert len(done) == 27  # 6 sizes of 4 norms, CBN being BN at 2 of them, 2 more at 2 sizes, and a wider window
    missing = {}
    for name in ("compensation", "order", "backward", "window", "bound", "norms", "weights"):
        fresh = [each for each in names(TABLES[name].configs(Scale.SMALL)) if each not in done]
        done.update(fresh)
        missing[name] = fresh
    own = "batch 2, window 8"
    assert missing["compensation"] == missing["backward"] == []
    assert missing["order"] == [f"CBN, {own}, order 2"]
    assert missing["window"] == [
        name
        for k in (2, 4, 8, 16)
        for name in (
            f"CBN, batch 2, window {k}",
            f"CBN, batch 2, window {k}, weights auto",
            f"naive CBN, batch 2, window {k}",
        )
        if k != 8 or "auto" in name
    ]
    assert missing["bound"] == [f"exact, {each} gradient, {own}" for each in ("none", "own", "full")]
    assert missing["norms"] == ["IN, batch 2", "LN, batch 2"]
    assert len(missing["weights"]) == 26  # four kinds at four sizes but for one, the bound, and ten rates with burn-in


def test_norms_stand_beside_the_paper_s() -> None:
    rows = TABLES["norms"].rows(results_of(TABLES["norms"], by_norm))
    assert [row.name for row in rows] == ["IN", "LN", "GN", "BN", "CBN", "BN at batch 32"]
    assert [row.paper.get("accuracy") for row in rows] == [64.4, 67.9, 68.9, None, 70.2, 70.2]
    assert [row.remark for row in rows[3:]] == ["-10.0 ± 0.0 to CBN", "", "-10.0 ± 0.0 to CBN"]
    assert "all at a batch of 32" in TABLES["norms"].notes(Scale.SMALL)[-1]


def test_batch_sizes_have_a_wider_window_at_1() -> None:
    rows = TABLES["batch_size"].rows(results_of(TABLES["batch_size"], by_norm))
    assert [row.name for row in rows] == [f"batch {size}" for size in (32, 16, 8, 4, 2, 1)]
    assert rows[-1].ours.keys() == {"BN", "GN", "BRN", "CBN", "naive", "detached", "CBN, k = 16"}
    assert (
        rows[-2].remark
        == "+10.0 ± 0.0 to BN, +10.0 ± 0.0 to GN, +10.0 ± 0.0 to BRN, +10.0 ± 0.0 to naive, +0.0 ± 0.0 to detached (?)"
    )
    assert rows[-3].ours.keys() == {"BN", "GN", "BRN", "CBN"}
    assert rows[0].remark == "+0.0 ± 0.0 to GN (?), +0.0 ± 0.0 to BRN (?)"


def test_medium_scale_has_more_norms_at_their_own_learning_rates() -> None:
    tasks = {task.name: task for task in TABLES["batch_size"].configs(Scale.MEDIUM)}
    rows = TABLES["batch_size"].rows(results_of(TABLES["batch_size"], by_norm, scale=Scale.MEDIUM))
    assert [row.name for row in rows] == [f"batch {size}" for size in (32, 8, 4, 2, 1)]
    assert list(rows[0].ours) == ["BN"]
    assert list(rows[1].ours) == list(MEDIUM_NORMS)
    assert list(rows[3].ours) == [*MEDIUM_NORMS, "exact, own layer"]
    for task in tasks.values():
        recipe = recipe_of(task)
        assert (recipe.train_images, recipe.epochs, recipe.burn_in_epochs, recipe.validate) == (10_000, 8, 0, False)
    for norm, chosen in CHOSEN.items():
        cell = TABLES["batch_size"].grid(Scale.MEDIUM)["batch 4"][norm]
        rate = tasks[cell.name].settings["learning_rate"]
        assert rate == pytest.approx(0.1 * 4 / 32 * FACTORS[chosen])


def test_learning_rates_are_chosen_on_images_that_are_not_trained_on() -> None:
    tasks = LEARNING_RATE.configs(Scale.MEDIUM)
    assert len(tasks) == 3 * len(MEDIUM_NORMS)
    assert all(recipe_of(task).validate for task in tasks)
    # The largest of the three is best.
    results = results_of(LEARNING_RATE, lambda task: task.settings["learning_rate"], scale=Scale.MEDIUM)
    assert LEARNING_RATE.choose(results) == dict.fromkeys(MEDIUM_NORMS, "three times")


def test_rates_are_those_that_the_records_speak_for() -> None:
    assert LEARNING_RATE.choose(read(BENCHMARKS / "classification-medium.jsonl")) == CHOSEN
    found = FINETUNE.choose(read(BENCHMARKS / "classification-small.jsonl"))
    assert {data: found[data] for data in TUNED} == TUNED


def test_fine_tuning_has_rates_of_its_own() -> None:
    results = results_of(FINETUNE, lambda task: -abs(task.settings["learning_rate"] - 0.01 * 2 / 32))
    chosen = FINETUNE.choose(results)
    assert chosen == {data: dict.fromkeys(TUNED_NORMS, 0.01) for data in TUNED_DATA}
    for task in FINETUNE.configs(Scale.SMALL):
        recipe = recipe_of(task)
        assert (recipe.model, recipe.image_size, recipe.train_images) == ("efficientnet_lite0", 96, 1000)
        assert recipe.validate == task.name.startswith("validated")
        assert recipe.norm_options.get("prior") == ("running" if "prior running" in task.name else None)


def test_windows_begin_with_batch_norm() -> None:
    rows = TABLES["window"].rows(results_of(TABLES["window"], by_norm))
    assert [row.name for row in rows] == ["k = 1", "k = 2", "k = 4", "k = 8", "k = 16"]
    assert rows[0].ours["CBN"] == rows[0].ours["naive"] == rows[0].ours["BN, k times the batch"]
    assert rows[4].remark == "+0.0 ± 0.0 to CBN, auto (?), +10.0 ± 0.0 to naive, +10.0 ± 0.0 to BN, k times the batch"
    tasks = {task.name: task for task in TABLES["window"].configs(Scale.FULL)}
    assert tasks["BN, batch 64"].settings["batch_size"] == 64
    assert tasks["naive CBN, batch 4, window 16"].settings["window"] == 16


def test_compensation_lies_between_batch_norms() -> None:
    assert [row.name for row in TABLES["compensation"].rows(results_of(TABLES["compensation"], by_norm))] == [
        *("CBN", "naive CBN", "BN at batch 2", "BN at batch 16")
    ]
    assert list(TABLES["compensation"].cells(Scale.FULL)) == ["CBN", "naive CBN", "BN at batch 4", "BN at batch 16"]


def test_burn_in_is_a_share_of_the_training() -> None:
    tasks = {task.name: task for task in TABLES["burn_in"].configs(Scale.FULL)}
    epochs = [task.settings["burn_in_epochs"] for task in tasks.values() if "detached" not in task.name]
    assert epochs == [0, 10, 25, 50, 75]
    rows = TABLES["burn_in"].rows(results_of(TABLES["burn_in"], by_norm))
    assert [row.name for row in rows] == ["0%", "10%", "25%", "50%", "75%"]
    assert rows[0].remark == "+0.0 ± 0.0 to detached (?)"


def test_orders_and_gradients() -> None:
    rows = TABLES["order"].rows(results_of(TABLES["order"], by_norm))
    assert [row.name for row in rows] == ["BN", "naive CBN", "CBN, first order", "CBN, second order"]
    assert [row.remark for row in rows] == [
        *["-10.0 ± 0.0 to CBN, first order"] * 2,
        *("", "+0.0 ± 0.0 to CBN, first order (?)"),
    ]
    assert [row.name for row in TABLES["backward"].rows(results_of(TABLES["backward"], by_norm))] == [
        *("BN", "GN", "CBN, through", "CBN, detached")
    ]


def test_positions_are_the_library_s_choice_once_and_all_at_full_scale() -> None:
    small, full = (
        {task.name: task.settings["norm_options"]["positions"] for task in TABLES["positions"].configs(scale)}
        for scale in (Scale.SMALL, Scale.FULL)
    )
    assert list(small.values()) == list(full.values()) == [16, 32, 64, 128, 256, None]
    assert small["CBN, batch 2, window 8"] == 128
    assert full["CBN, batch 4, window 4"] is None


def test_bounds_are_compared_with_what_they_bound() -> None:
    rows = TABLES["bound"].rows(results_of(TABLES["bound"], by_norm))
    assert [row.name for row in rows] == [
        *("BN at batch 2", "CBN, detached", "CBN", "exact, no gradient", "exact, own layer", "exact, full gradient"),
        "BN at batch 16",
    ]
    assert rows[5].remark == "-10.0 ± 0.0 to CBN"


def test_weights_are_compared_without_burn_in() -> None:
    rows = TABLES["weights"].rows(results_of(TABLES["weights"], by_norm))
    assert [row.name for row in rows] == [f"batch {size}{burn}" for burn in ("", ", burn-in") for size in (8, 4, 2, 1)]
    assert (
        rows[0].remark
        == "+10.0 ± 0.0 to BN, +0.0 ± 0.0 to equal (?), +0.0 ± 0.0 to decay 0.85 (?), +0.0 ± 0.0 to decay 0.7 (?)"
    )
    assert "exact, own layer" in rows[2].ours
    tasks = {task.name: task for task in TABLES["weights"].configs(Scale.SMALL)}
    assert tasks["CBN, batch 2, window 8, weights auto, burn-in 0%"].settings["burn_in_epochs"] == 0
    chosen = {name: recipe_of(task).norm_options.get("weights") for name, task in tasks.items()}
    assert chosen["CBN, batch 2, window 8, weights auto, burn-in 0%"] == "auto"
    assert chosen["CBN, batch 2, window 8, burn-in 0%"] == "equal"
    assert chosen["BN, batch 2"] is None
    full = {task.name: task.settings for task in TABLES["weights"].configs(Scale.FULL)}
    assert full["CBN, batch 8, window 2, decay 0.7, burn-in 0%"]["norm_options"] == {"decay": 0.7, "positions": None}
    assert [len(TABLES["weights"].configs(scale)) for scale in (Scale.SMALL, Scale.FULL)] == [34 * 5, 34]


def test_norms_behind_activations_are_compared_in_each_network() -> None:
    rows = TABLES["activations"].rows(results_of(TABLES["activations"], by_norm))
    assert [row.name for row in rows] == [
        f"{network}, batch {size}" for network in ("ResNet-8, norms last", "ConvMixer-4") for size in (2, 1)
    ]
    assert [row.remark for row in rows] == ["+10.0 ± 0.0 to BN"] * 4
    tasks = {task.name: task for task in TABLES["activations"].configs(Scale.SMALL)}
    task = tasks["ConvMixer-4, CBN, batch 2, window 8, compensate_through activations, weights auto, burn-in 0%"]
    assert task.settings["model"] == "convmixer4"
    assert recipe_of(task).norm_options["compensate_through"] == "activations"


def test_improvements_add_variants_to_runs_of_other_tables() -> None:
    tasks = TABLES["improvements"].configs(Scale.SMALL)
    assert [len(TABLES["improvements"].configs(scale)) for scale in (Scale.SMALL, Scale.FULL)] == [4 * 5 + 4 + 3 * 3, 4]
    others = {task.key for task in TABLES["bound"].configs(Scale.SMALL, 5)}
    known = [task for task in tasks if task.key in others]
    assert names(known) == [
        *("BN, batch 2", "CBN, batch 2, window 8", "exact, own gradient, batch 2, window 8"),
    ]
    assert all("variant" not in task.settings for task in known)
    assert names(task for task in tasks if "variant" in task.settings) == [
        "BN, batch 2, recalibrated",
        *(f"CBN, batch 2, window 8, {each}" for each in ("growing from 2", "extrapolated", "recalibrated")),
    ]
    assert len(TABLES["improvements"].configs(Scale.SMALL, 1)) == 8


def test_improvements_are_compared_with_cbn_and_explained() -> None:
    rows = TABLES["improvements"].rows(results_of(TABLES["improvements"], by_norm))
    assert [row.name for row in rows][:4] == ["BN", "BN, recalibrated", "CBN", "CBN, decay 0.7"]
    assert [row.remark for row in rows[1:4]] == ["-10.0 ± 0.0 to CBN", "", "+0.0 ± 0.0 to CBN (?)"]
    told = " ".join(TABLES["improvements"].notes(Scale.FULL))
    assert "Decay" in told
    assert not any(word in told for word in ("Window from", "Extrapolated", "Recalibrated"))
    told = " ".join(TABLES["improvements"].notes(Scale.SMALL))
    assert all(word in told for word in ("Decay", "Window from 2 to 8:", "Extrapolated", "Recalibrated"))


def test_variants_that_have_left_are_not_trained() -> None:
    tasks = TABLES["improvements"].configs(Scale.SMALL)
    with pytest.raises(UnavailableError, match=r"'BN, batch 2, recalibrated' can be shown .* 61dfb96; .* --output"):
        TABLES["improvements"].check(tasks)


def test_architectures_are_networks_by_norms() -> None:
    tasks = TABLES["architectures"].configs(Scale.SMALL)
    assert len(tasks) == 25
    sizes = {task.settings["model"]: task.settings["image_size"] for task in tasks}
    assert sizes == {"resnet50": 32, "vgg16_bn": 32, "inception_v3": 75, "densenet121": 32, "mobilenet_v2": 32}
    assert {task.settings["model"] for task in tasks if task.settings["head"] == "pooled"} == {"vgg16_bn"}
    row = TABLES["architectures"].rows(results_of(TABLES["architectures"], by_norm))[3]
    assert row.name == "DenseNet-121"
    assert row.ours.keys() == {"BN 32", "BN 4", "GN", "BRN", "CBN"}
    assert row.remark == "+10.0 ± 0.0 to BN 32, +10.0 ± 0.0 to BN 4, +10.0 ± 0.0 to GN, +10.0 ± 0.0 to BRN"
    full = {task.settings["model"]: task.settings for task in TABLES["architectures"].configs(Scale.FULL)}
    assert [full[name]["image_size"] for name in ("inception_v3", "resnet50")] == [299, None]
    assert all(settings["head"] == "own" for settings in full.values())


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name in TABLES for scale in TABLES[name].scales])
def test_notes_say_how_it_was_done_and_where_the_paper_stands(name: str, scale: Scale) -> None:
    told = TABLES[name].notes(scale)
    assert told[0].startswith((f"{scale.value.title()} scale", "ResNet-18 on", "The networks"))
    assert "paper" in " ".join(told[1:])
    assert "at hand" not in " ".join(told)


@pytest.mark.parametrize("scale", [Scale.SMALL, Scale.MEDIUM])
def test_no_committed_record_is_lost(scale: Scale) -> None:
    """Every one is of a cell of some table, with its settings, and stands in it."""
    records = read(BENCHMARKS / f"{KIND}-{scale.value}.jsonl")
    tables = [table for table in TABLES.values() if scale in table.scales]
    shown = {record.key for table in tables for record in of_cells(records, table.configs(scale))}
    assert len(records) > 30
    assert [record.name for record in records if record.key not in shown] == []


def test_a_table_shows_all_seeds_that_there_are() -> None:
    """BN at batch 4 has five seeds for `weights` where `batch_size` asks for three: both show five."""
    records = read(BENCHMARKS / "classification-small.jsonl")
    found = of_cells(records, TABLES["batch_size"].configs(Scale.SMALL))
    assert [len(by_name(found)[name]) for name in ("BN, batch 4", "GN, batch 4")] == [5, 3]
    own, other = ({row.name: row for row in table.rows(records)} for table in (TABLES["batch_size"], TABLES["weights"]))
    assert own["batch 4"].ours["BN"] == other["batch 4"].ours["BN"] == pytest.approx((41.0, 0.8), abs=0.05)


def test_rows_of_a_list_have_accuracies_time_and_the_difference_to_one_of_them() -> None:
    results = [each for each in results_of(TABLES["order"], by_norm) if "order 2" not in each.name]
    bn, _, ours = TABLES["order"].rows(results)  # the second order was not run
    assert (bn.name, ours.name) == ("BN", "CBN, first order")
    assert bn.ours["accuracy"] == pytest.approx((51, 2**0.5))
    assert bn.ours["training"] == pytest.approx((61, 2**0.5))
    assert ours.ours["milliseconds"] == pytest.approx((10, 0))
    assert (bn.paper, ours.paper) == ({"accuracy": 65.1}, {"accuracy": 70.0})
    assert (bn.remark, ours.remark) == ("-10.0 ± 0.0 to CBN, first order", "")
    assert {measure.name for measure in TABLES["order"].measures} == bn.ours.keys()


def test_rows_of_a_grid_compare_one_column_with_the_others() -> None:
    tasks = [task for task in TABLES["batch_size"].configs(Scale.SMALL, 2) if task.settings["batch_size"] in (2, 32)]
    few = [task for task in tasks if task.settings["norm"] in ("bn", "cbn") and "detached" not in task.name]
    many, two = TABLES["batch_size"].rows([result(task, by_norm(task)) for task in few])
    assert two.ours == {"BN": pytest.approx((51, 2**0.5)), "CBN": pytest.approx((61, 2**0.5))}
    assert two.remark == "+10.0 ± 0.0 to BN"
    assert two.paper["BN"] == 55.9
    assert many.ours["BN"] == many.ours["CBN"]  # the same run
    assert many.remark == ""


def test_a_difference_within_the_noise_is_doubtful() -> None:
    own = ("BN, batch 2", "CBN, batch 2, window 8")
    tasks = [task for task in TABLES["order"].configs(Scale.SMALL, 2) if task.name in own]
    near = [result(task, 0.5 + (0.03 * task.seed - 0.005) * (task.settings["norm"] == "cbn")) for task in tasks]
    assert TABLES["order"].rows(near)[0].remark == "-1.0 ± 19.1 to CBN, first order (?)"
