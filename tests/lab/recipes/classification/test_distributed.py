"""Two processes on gloo: started by torchrun, as it would, and by the engine's own launcher."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import crossbn
from crossbn.lab import records
from crossbn.lab.recipes.classification import Machine, Recipe, train
from tests.lab.recipes.classification.runs import SMALL, Fragile, differences
from tests.processes import ROOT, ended, printed, run_pair, start_command, states
from tests.support import run_python

CBN = replace(SMALL, burn_in_epochs=0.2, test_images=31)
SWITCHING = replace(SMALL, norm="bn", switch_norm="sync_bn", switch_epoch=1.0)
NEVER = 10**9
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", __name__)


def work(name: str, folder: Path, forward: int) -> None:
    """What each process does: train, then save what it has."""
    kept: list[nn.Module] = []

    def wrap(network: nn.Module, _: Recipe) -> nn.Module:
        kept.append(Fragile(network, forward))
        return kept[0]

    recipe = replace({"cbn": CBN, "switching": SWITCHING}[name], wrap=wrap)
    train(recipe, folder, machine=Machine(accelerator="cpu", checkpoint_steps=1))
    state = {"model": kept[0].state_dict(), "history": crossbn.history_state(kept[0])}
    torch.save(state, folder / f"{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    run_python(*TORCHRUN, "cbn", folder, str(NEVER), folder=ROOT, variables={"OMP_NUM_THREADS": "1"})
    return folder


@pytest.mark.slow
def test_parameters_are_shared_and_histories_are_not(straight: Path) -> None:
    first, second = states(straight)
    parameters = [name for name in first["model"] if name.endswith(("weight", "bias"))]
    assert [name for name in parameters if not torch.equal(first["model"][name], second["model"][name])] == []
    assert first["history"].keys() == second["history"].keys()
    means = [name for name in first["history"] if name.endswith("/mean")]
    assert not any(torch.allclose(first["history"][name], second["history"][name]) for name in means)
    saved = torch.load(straight / "last.ckpt", weights_only=True)
    assert [len(history) for history in saved["crossbn"]["histories"]] == [len(first["history"])] * 2
    for rank, state in enumerate((first, second)):
        kept = saved["crossbn"]["histories"][rank]
        assert all(torch.equal(kept[f"network.{name}"], tensor) for name, tensor in state["history"].items())


@pytest.mark.slow
def test_record_is_of_both_processes(straight: Path) -> None:
    (record,) = records.read(straight / "record.jsonl")
    curve = record.values["curve"]
    assert (record.settings["processes"], record.values["tested_images"], len(curve)) == (2, 31, 2)
    assert all(point["test_accuracy"] * 31 == pytest.approx(round(point["test_accuracy"] * 31)) for point in curve)


@pytest.mark.slow
def test_goes_on_bit_for_bit(straight: Path, tmp_path: Path) -> None:
    assert run_pair(work, "cbn", tmp_path, 7) == [1, 1]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 7
    assert run_pair(work, "cbn", tmp_path, NEVER) == [0, 0]
    for expected, found in zip(states(straight), states(tmp_path), strict=True):
        assert differences(expected, found) == []
    assert differences(*(torch.load(folder / "last.ckpt", weights_only=True) for folder in (straight, tmp_path))) == []


@pytest.mark.slow
def test_engines_own_launcher_computes_the_same(straight: Path, tmp_path: Path) -> None:
    names = ("model", "width", "batch_size", "epochs", "train_images", "test_images", "burn_in_epochs", "data")
    options = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(CBN, name)))]
    machine = ["--lr", str(CBN.learning_rate), "--devices", "2", "--accelerator", "cpu", "--output", str(tmp_path)]
    assert ended(start_command("train", "classify", *options, *machine, output=tmp_path / "printed")) == 0
    result, news = printed(tmp_path / "printed")
    assert result.count("test images after 2 epochs") == 1
    assert news.count("epoch 2: loss") == 1
    curves = [records.read(folder / "record.jsonl")[0].values["curve"] for folder in (straight, tmp_path)]
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_norms_that_join_processes_can_be_switched_to(tmp_path: Path) -> None:
    assert run_pair(work, "switching", tmp_path, NEVER) == [0, 0]
    first, second = (state["model"] for state in states(tmp_path))
    buffers = [name for name in first if name.endswith(("running_mean", "running_var"))]
    # The first process's are broadcast before each step; after it they are still alike only if it was a joint one.
    assert len(buffers) == 18
    assert [name for name in buffers if not torch.allclose(first[name], second[name], rtol=1e-5)] == []


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
