import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from crossbn import convert
from crossbn.cli import batches, extras
from crossbn.cli.batches import Batch, BatchSpec, find_batches
from crossbn.conversion_report import ConversionReport
from crossbn.convert import convert_
from crossbn.lab import records
from crossbn.lab.fidelity import CauseRecord, read
from crossbn.nn import CrossIterBatchNorm, Settings
from tests.cli.answers import call

TINY = ("diagnose", "--model", "tests.cli.test_diagnose:tiny", "--image-size", "8", "--channels", "1")
OWN = "tests.cli.test_diagnose"
SHORT = ("--batch-size", "4", "--window", "3", "--steps", "8", "--every", "4")


def tiny() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 10),
        nn.BatchNorm1d(10),
    )


def deep() -> nn.Sequential:
    inner = nn.Sequential(OrderedDict(downsample=tiny()[:3]))
    return nn.Sequential(OrderedDict(outermost=inner, flat=nn.Flatten(), last=nn.Linear(144, 10)))


def without_norms() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Telling(nn.Module):
    """A model whose output is a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"scores": self.body(images)}


def telling() -> Telling:
    return Telling()


CALLS: list[str] = []
"""Of `pairs` and `once`."""


def images(seed: int, size: int = 8) -> Tensor:
    return torch.randn(2, 1, size, size, generator=torch.Generator().manual_seed(seed))


def pairs() -> list[tuple[Tensor, Tensor]]:
    CALLS.append("pairs")
    return [(images(i), torch.tensor([i, 9], dtype=torch.int32)) for i in range(3)]


def once() -> Iterator[tuple[Tensor, Tensor]]:
    CALLS.append("once")
    yield from ((batch, target.long()) for batch, target in pairs())


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(7, 1, 8, 8), torch.arange(7)), batch_size=3, shuffle=True)


def heights() -> list[Any]:
    return [(images(0), torch.ones(2, 10))]


def eleven() -> list[Any]:
    return [(images(0), torch.tensor([0, 10]))]


def growing() -> list[Any]:
    return [(images(0, size), torch.tensor([0, 1])) for size in (8, 8, 9)]


def sizes() -> list[Any]:
    return [(images(0, size), torch.tensor([0, 1])) for size in (8, 9, 10)]


def any_size() -> nn.Sequential:
    return nn.Sequential(tiny()[:3], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def nothing() -> None:
    return None


def empty() -> Iterator[Any]:
    yield from ()


def alone() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(4, 1, 8, 8)), batch_size=2)


def bare() -> list[Any]:
    return [images(0)]


def words() -> list[Any]:
    return [("a word", torch.tensor([1, 2]))]


def examples() -> list[Any]:
    return [(images(0)[0], 1)]


def tensor_examples() -> TensorDataset:
    return TensorDataset(images(0), torch.tensor([3, 4]))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def each(output: Tensor, target: Tensor) -> Tensor:
    return output[torch.arange(len(target)), target]


def nan_at_once(output: Tensor, _: Tensor) -> Tensor:
    return output.sum() * float("nan")


def nan_later(output: Tensor, _: Tensor) -> Tensor:
    CALLS.append("nan_later")
    return output.square().mean() * (float("nan") if len(CALLS) > 7 else 1.0)  # the first is a look at the batch


def unrelated(_: Tensor, target: Tensor) -> Tensor:
    return target.float().mean()


@pytest.mark.parametrize("data", ["digits", "random"])
def test_measures_and_writes(data: str, tmp_path: Path) -> None:
    answer = call(*TINY, *SHORT, "--data", data, "--output", tmp_path)
    assert answer.status == 0, answer.errors
    (record,) = records.read(tmp_path / "records.jsonl")
    assert (record.kind, record.name, record.seed) == ("diagnose", f"{OWN}:tiny, {data}, batch 4", 0)
    assert (record.settings["window"], record.settings["input_shape"]) == (3, [1, 8, 8])
    assert {(r.step, r.layer, r.age, r.truth) for r in read(tmp_path / "records.jsonl")} == {
        (step, layer, age, truth)
        for step in (4, 8)
        for layer in ("1", "5")
        for age in (1, 2)
        for truth in ("same layer", "whole network")
    }
    page = (tmp_path / "table.md").read_text(encoding="utf-8")
    sentence = page.splitlines()[0]
    assert sentence.startswith("Too little was measured to rely on: 2 measurements where it takes 4. So far: window ")
    assert re.search(r" Remembered variances are [\d.]+% off those .* batch, mostly because .*\)\.$", sentence)
    assert re.sub(r"\s+", " ", answer.output).lstrip().startswith(sentence)
    assert "2 measurements." in page
    assert "batch size 4, window 3" in page
    titles = [line[4:] for line in page.splitlines() if line.startswith("### ")]
    assert titles[2:] == ["By layer", "By cause", "By cause"]
    assert {each.layer for each in CauseRecord.of(record)} == {"1", "5"}
    assert "By age" in answer.output
    assert "By layer" not in answer.output
    verbose = call(*TINY, *SHORT, "--data", data, "--output", tmp_path, "--verbose").output
    assert "By layer" in verbose
    assert "batch size 4, window 3" in re.sub(r"\s+", " ", verbose)
    assert re.search(r"\| 1 \| \d+\.\d → \d+\.\d \|", page)
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_finds_the_same(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        call(*TINY, *SHORT, "--seed", "3", "--output", tmp_path / name)
        found.append((tmp_path / name / "records.jsonl").read_text())
    assert found[0] == found[1]
    call(*TINY, *SHORT, "--output", tmp_path / "a")
    assert (tmp_path / "a" / "records.jsonl").read_text() != found[0]


def test_settings_reach_the_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def watched(model: nn.Module, **settings: Any) -> ConversionReport:
        report = convert_(model, **settings)
        seen.extend(norm.settings for norm in model.modules() if isinstance(norm, CrossIterBatchNorm))
        return report

    monkeypatch.setattr(convert, "convert_", watched)
    words = (
        "--burn-in",
        "3",
        "--order",
        "2",
        "--positions",
        "0",
        "--batch-size",
        "2",
        "--steps",
        "10",
        "--every",
        "10",
    )
    answer = call(*TINY, *words, "--data", "random", "--output", tmp_path)
    assert answer.status == 0, answer.errors
    assert seen == 2 * [Settings(window=8, burn_in=3, order=2, positions=None)]
    answer = call(*TINY, "--weights", "equal", "--steps", "4", "--data", "random", "--output", tmp_path)
    assert answer.status == 0, answer.errors
    assert seen[-1].weights == "equal"
    assert [each.settings["weights"] for each in records.read(tmp_path / "records.jsonl")] == ["auto", "equal"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "nowhere:net"], "'nowhere:net' cannot be imported: No module named 'nowhere'"),
        (["--model", f"{OWN}:squares"], "cannot be called with no arguments: its signature is (output: "),
        (["--model", "resnet"], "there is no model 'resnet'"),
        (
            ["--data", "cifra10"],
            "there is no data set 'cifra10': did you mean cifar10 or cifar100?; images of your own are",
        ),
        (["--data", "cifar10", "--channels", "2"], "the images of cifar10 have 3 channels, which can be made 1, not 2"),
        (["--data", "nowhere:batches"], "'nowhere:batches' cannot be imported: No module named 'nowhere'"),
        (["--data", f"{OWN}:nothing_such"], f"the module {OWN!r} has no 'nothing_such'"),
        (["--data", "my-file:pairs"], "'my-file:pairs' is not package.module:function"),
        (["--data", f"{OWN}:TINY"], f"{OWN + ':TINY'!r} is of <class 'tuple'>, which cannot be called"),
        (["--data", f"{OWN}:squares"], "cannot be called with no arguments: its signature is (output: "),
        (["--loss", "nowhere:loss"], "'nowhere:loss' cannot be imported: No module named 'nowhere'"),
        (["--loss", f"{OWN}:pairs"], f"{OWN + ':pairs'!r} cannot be called with 2 arguments: its signature is () -> "),
        (["--window", "1"], "--window"),
        (["--order", "3"], "--order"),
        (["--weights", "even", "--data", "random"], "weights must be one of 'equal', 'auto', got 'even'"),
        (["--steps", "10", "--every", "20"], "no measurement: 10 steps, one every 20"),
        (["--output", __file__], "--output"),
    ],
)
def test_usage_errors(words: list[str], complaint: str) -> None:
    answer = call("diagnose", *words)
    assert (answer.status, answer.output) == (2, "")
    assert complaint in answer.errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--channels", "2"], "the model does not run with input (4, 2, 8, 8): "),
        (["--data", f"{OWN}:nothing"], f"{OWN}:nothing returns None, which yields no batches: a batch is a pair"),
        (["--data", f"{OWN}:empty"], f"{OWN}:empty yields no batch"),
        (["--data", f"{OWN}:alone"], f"{OWN}:alone yields a list of 1: a batch is a pair of input and target"),
        (["--data", f"{OWN}:bare"], f"{OWN}:bare yields a Tensor: a batch is a pair of input and target"),
        (["--data", f"{OWN}:words"], f"{OWN}:words yields inputs without a tensor, a str: a batch is a pair"),
        (["--data", f"{OWN}:examples"], f"{OWN}:examples yields single examples, with targets such as 1: a batch is"),
        (["--data", f"{OWN}:tensor_examples"], "yields single examples, with targets such as 3: a batch is"),
        (["--data", f"{OWN}:growing"], "the model does not run with input (2, 1, 9, 9): "),
        (["--data", f"{OWN}:heights"], "output (2, 10) and target (2, 10): the target is no tensor of integer classes"),
        (
            ["--data", f"{OWN}:eleven"],
            "there is no loss of output (2, 10) and target (2,): Target 10 is out of bounds.",
        ),
        (["--model", f"{OWN}:nothing"], "the model's function returned None, which is no torch.nn.Module"),
        (["--model", f"{OWN}:telling"], "and target (4,): the output is no tensor of scores; --loss names a function"),
        (["--loss", f"{OWN}:each"], "the loss is (4,) in place of one number"),
        (["--loss", f"{OWN}:unrelated"], "the loss does not depend on the model's weights"),
        (["--model", "tests.cli.test_diagnose:without_norms"], "no BatchNorm that can be converted"),
        (["--burn-in", "100"], "no step was remembered"),
    ],
)
def test_other_mistakes_end_with_a_sentence(words: list[str], complaint: str, tmp_path: Path) -> None:
    answer = call(*TINY, *SHORT, *words, "--output", tmp_path)
    assert (answer.status, answer.output) == (1, "")
    assert answer.errors.splitlines()[-1].startswith("crossbn: ")
    assert complaint in answer.errors.splitlines()[-1]


def test_interruption_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(data: str, spec: BatchSpec) -> Iterator[Batch]:
        for step, batch in enumerate(find_batches(data, spec)):
            if step == 7:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(batches, "find_batches", interrupted)
    answer = call(*TINY, *SHORT, "--data", "random", "--output", tmp_path)
    assert answer.status == 130
    assert answer.errors.endswith(f"interrupted; {tmp_path / 'records.jsonl'} has what was measured until then\n")
    assert {record.step for record in read(tmp_path / "records.jsonl")} == {4}


def test_interruption_before_training_keeps_earlier_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    earlier = records.Record("diagnose", "earlier", 0, {}, {})
    records.append(tmp_path / "records.jsonl", [earlier])
    monkeypatch.setattr(batches, "find_batches", interrupted)
    answer = call(*TINY, *SHORT, "--output", tmp_path)
    assert (answer.status, answer.errors) == (130, "crossbn: interrupted; nothing was measured\n")
    assert records.read(tmp_path / "records.jsonl") == [earlier]


def test_records_of_other_work_stay(tmp_path: Path) -> None:
    path, others = tmp_path / "records.jsonl", [records.Record("cost", name, 0, {}, {"seconds": 1}) for name in "ab"]
    records.append(path, others)
    for steps in ("8", "8", "4"):
        answer = call(*TINY, *SHORT, "--steps", steps, "--data", "random", "--output", tmp_path)
        assert answer.status == 0, answer.errors
    found = records.read(path)
    assert found[:2] == others
    assert [each.settings["steps"] for each in found[2:]] == [8, 4]


def test_a_damaged_file_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("damaged\n")
    answer = call(*TINY, "--model", "nowhere:net", "--output", tmp_path)
    assert (answer.status, answer.output) == (1, "")
    assert "records.jsonl is not a record of crossbn's; take the line out, or take another --output" in answer.errors
    assert (tmp_path / "records.jsonl").read_text() == "damaged\n"


@pytest.mark.parametrize(
    ("loss", "step", "kept"),
    [("nan_at_once", 1, "nothing was measured"), ("nan_later", 7, "records.jsonl has what was measured until then")],
)
def test_a_loss_that_is_not_finite_stops_it(loss: str, step: int, kept: str, tmp_path: Path) -> None:
    CALLS.clear()
    answer = call(*TINY, *SHORT, "--loss", f"{OWN}:{loss}", "--data", "random", "--output", tmp_path)
    assert (answer.status, answer.output) == (1, "")
    sentence = answer.errors.splitlines()[-1]
    assert sentence.startswith(f"crossbn: the loss is not finite in step {step}: a learning rate below 0.01 may help")
    assert sentence.endswith(kept)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, {1}), (5, {2, 4}), (30, set(range(3, 31, 3)))],  # a tenth, but 2 at least where there are as many
)
def test_measures_every_tenth_of_the_steps(steps: int, expected: set[int], tmp_path: Path) -> None:
    answer = call(*TINY, "--steps", f"{steps}", "--data", "random", "--output", tmp_path)
    assert answer.status == 0, answer.errors
    assert {record.step for record in read(tmp_path / "records.jsonl")} == expected


def test_batches_of_a_function_begin_again(tmp_path: Path) -> None:
    found = {}
    for data in ("pairs", "once"):
        CALLS.clear()
        answer = call(*TINY, "--steps", "8", "--every", "4", "--data", f"{OWN}:{data}", "--output", tmp_path / data)
        assert answer.status == 0, answer.errors
        found[data] = read(tmp_path / data / "records.jsonl")
        # Ten batches, one to look at: a list is gone through again, a generator is made again.
        assert CALLS.count(data) == {"pairs": 1, "once": 4}[data]
        told = records.read(tmp_path / data / "records.jsonl")[0].settings
        assert (told["data"], told["batch_size"], told["window"]) == (f"{OWN}:{data}", 2, 8)  # whatever is asked for
    assert found["pairs"] == found["once"]


def test_loader_of_one_s_own_with_an_uneven_last_batch(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        torch.rand(1)
        answer = call(*TINY, "--steps", "12", "--data", f"{OWN}:shuffled", "--output", tmp_path)
        assert answer.status == 0, answer.errors
        found.append((tmp_path / "records.jsonl").read_text())
    assert found[0] == found[1]
    assert records.read(tmp_path / "records.jsonl")[0].settings["window"] == 6


def test_loss_of_one_s_own(tmp_path: Path) -> None:
    words = ("--data", f"{OWN}:heights", "--steps", "4", "--verbose")
    found = []
    for number, loss in enumerate((f"{OWN}:squares", "torch.nn.functional:mse_loss", "torch.nn.functional:l1_loss")):
        answer = call(*TINY, *words, "--loss", loss, "--output", tmp_path / f"{number}")
        assert answer.status == 0, answer.errors
        assert f"loss {loss}," in re.sub(r"\s+", " ", answer.output)
        found.append(read(tmp_path / f"{number}" / "records.jsonl"))
    assert found[0] == found[1] != found[2]


def test_batches_that_cannot_be_joined_leave_no_recommendation(tmp_path: Path) -> None:
    words = ("--model", f"{OWN}:any_size", "--data", f"{OWN}:sizes", "--steps", "4", "--output", tmp_path)
    answer = call("diagnose", *words, "--verbose")
    assert answer.status == 0, answer.errors
    output = re.sub(r"\s+", " ", answer.output)
    assert "No recommendation: there is nothing to recommend from: no layer was compared with the whole" in output
    assert "batches of different shapes cannot be joined" in output


def test_functions_are_looked_for_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here_alone.py").write_text("from tests.cli.test_diagnose import pairs as mine")
    monkeypatch.chdir(tmp_path)
    answer = call(*TINY, "--steps", "2", "--data", "here_alone:mine")
    assert answer.status == 0, answer.errors
    assert (tmp_path / "diagnose-results" / "fidelity.png").exists()


def test_long_names_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--model", f"{OWN}:deep", "--data", "random", "--image-size", "8", "--channels", "1", "--steps", "2")
    answer = call("diagnose", *words, "--output", tmp_path, "-v", columns=80)
    assert answer.status == 0, answer.errors
    shown = answer.output[answer.output.index("By layer") : answer.output.index("All numbers")]
    assert re.search(r"│ outermost\. +│.*\n│ downsample\.1 +│", shown)
    assert "…" not in shown
    assert "| outermost.downsample.1 |" in (tmp_path / "table.md").read_text()


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "matplotlib" else name)
    answer = call(*TINY, "--output", tmp_path / "results")
    assert answer.status == 1
    assert "needs matplotlib: pip install '.[demo]'" in answer.output
