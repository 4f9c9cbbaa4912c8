"""Two processes on gloo, with the variables that torchrun sets."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import crossbn
from crossbn.lab import records
from crossbn.lab.recipes.detection import Machine, Recipe, train
from tests.lab.recipes.detection.runs import SMALL
from tests.processes import run_pair, states

RUN = replace(SMALL, model="mask_rcnn", norm="bn", switch_norm="sync_bn", switch_epoch=1.0)
CBN = replace(SMALL, model="mask_rcnn")


def work(name: str, folder: Path) -> None:
    """What each process does: train, then save what it has."""
    kept: list[nn.Module] = []

    def keep(network: nn.Module, _: Recipe) -> nn.Module:
        kept.append(network)
        return network

    recipe = replace({"cbn": CBN, "switching": RUN}[name], wrap=keep)
    train(recipe, folder, machine=Machine(accelerator="cpu"))
    state = {"model": kept[0].state_dict(), "history": crossbn.history_state(kept[0])}
    torch.save(state, folder / f"{os.environ['RANK']}.pt")


@pytest.mark.slow
def test_weights_are_shared_histories_are_not_and_all_images_are_scored(tmp_path: Path) -> None:
    assert run_pair(work, "cbn", tmp_path) == [0, 0]
    first, second = states(tmp_path)
    parameters = [name for name in first["model"] if name.endswith(("weight", "bias"))]
    assert [name for name in parameters if not torch.equal(first["model"][name], second["model"][name])] == []
    means = [name for name in first["history"] if name.endswith("/mean")]
    assert means
    assert not any(torch.allclose(first["history"][name], second["history"][name]) for name in means)
    (record,) = records.read(tmp_path / "record.jsonl")
    values = record.values
    assert (record.settings["processes"], values["tested_images"], values["learning_rate_used"]) == (2, 3, 0.005)
    assert values["scores"]["mask AP"] is not None


@pytest.mark.slow
def test_synchronized_norms_can_be_switched_to(tmp_path: Path) -> None:
    assert run_pair(work, "switching", tmp_path) == [0, 0]
    first, second = (state["model"] for state in states(tmp_path))
    buffers = [name for name in first if name.endswith(("running_mean", "running_var"))]
    # The first process's are broadcast before each step; after it they are still alike only if it was a joint one.
    assert [name for name in buffers if not torch.allclose(first[name], second[name], rtol=1e-4)] == []
