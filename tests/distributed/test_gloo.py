"""Two processes on gloo: per-process histories by default, joined statistics with sync=True."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossbn
from tests.distributed.processes import WORLD, data, process_group, run_processes, train

BATCHES = [(2, 2), (3, 1), (1, 2), (2, 4), (2, 2)]  # examples per process, step by step
DATA = [data(step, sizes, 3, 5, 4) for step, sizes in enumerate(BATCHES)]


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)
    layers = [first, nn.BatchNorm2d(4), nn.Tanh(), second, nn.BatchNorm2d(6)]
    if "compensate_through" in options:
        layers = [first, nn.Tanh(), nn.BatchNorm2d(4), second, nn.GELU(), nn.BatchNorm2d(6)]
    model = nn.Sequential(*layers).double()
    crossbn.convert_(model, window=3, positions=None, **options)
    return model


def worker(rank: int, folder: str, options: dict[str, Any]) -> None:
    with process_group(rank, folder):
        core = build(**options)
        # DDP averages gradients over processes; the loss of the joined batch is their sum.
        model = DistributedDataParallel(core, broadcast_buffers=False)
        log = train(model, core, [parts[rank] for parts in DATA], float(WORLD))
        torch.save({"log": log, "history": crossbn.history_state(core)}, f"{folder}/{rank}.pt")


def run(folder: Path, **options: Any) -> list[dict[str, Any]]:
    run_processes(worker, (str(folder), options))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": 2},
        {"backward": "detached", "invalid": "drop"},
        {"weights": "auto"},
        {"compensate_through": "activations"},
    ],
    ids=str,
)
def test_sync_equals_one_process_with_the_joined_batch(tmp_path: Path, options: dict[str, Any]) -> None:
    results = run(tmp_path, sync=True, **options)
    alone = build(**options)
    expected = train(alone, alone, [torch.cat(parts) for parts in DATA], 1.0)
    for step, want in enumerate(expected):
        logs = [result["log"][step] for result in results]
        torch.testing.assert_close(torch.cat([log["out"] for log in logs]), want["out"], rtol=1e-9, atol=1e-10)
        for log in logs:
            for key in want.keys() - {"out"}:
                torch.testing.assert_close(log[key], want[key], rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_histories_stay_per_process(tmp_path: Path) -> None:
    first, second = run(tmp_path)
    # Same weights everywhere, as DDP has it; each process remembers its own batches.
    for key in ("0.weight", "1.weight", "3.weight"):
        assert torch.equal(first["log"][-1][key], second["log"][-1][key])
    for rank, result in enumerate((first, second)):
        counts = result["history"]["1/0/count"]
        assert sorted(counts.tolist()) == sorted(sizes[rank] * 20.0 for sizes in BATCHES[-2:])
    assert not torch.allclose(first["history"]["1/0/mean"], second["history"]["1/0/mean"])
