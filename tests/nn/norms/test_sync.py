"""BatchNorm over two processes on gloo: the joint batch's, forward and backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossbn
from tests.distributed.processes import WORLD, data, process_group, run_processes, train

BATCHES = [(2, 2), (3, 1), (1, 2), (0, 3), (1, 1)]
"""Examples per process, step by step."""
DATA = [data(step, sizes, 3, 3, 3) for step, sizes in enumerate(BATCHES)]
OPTIONS: list[dict[str, Any]] = [{}, {"affine": False}, {"momentum": None}]


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4, **options),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, bias=False),
        nn.BatchNorm2d(6, **options),
    )
    return model.double()


def worker(rank: int, folder: str) -> None:
    with process_group(rank, folder):
        logs = []
        for options in OPTIONS:
            core = build(**options)
            crossbn.swap_norm_(core, "sync_bn")
            # DDP averages gradients over processes; the loss of the joint batch is their sum.
            model = DistributedDataParallel(core, broadcast_buffers=False)
            logs.append(train(model, core, [parts[rank] for parts in DATA], float(WORLD)))
        torch.save(logs, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_are_one_with_the_joint_batch(tmp_path: Path) -> None:
    run_processes(worker, (str(tmp_path),))
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    for options, *logs in zip(OPTIONS, *results, strict=True):
        alone = build(**options)
        expected = train(alone, alone, [torch.cat(parts) for parts in DATA], 1.0)
        for want, *got in zip(expected, *logs, strict=True):
            torch.testing.assert_close(torch.cat([log["out"] for log in got]), want["out"], rtol=1e-9, atol=1e-10)
            for log in got:
                for key in want.keys() - {"out"}:
                    torch.testing.assert_close(log[key], want[key], rtol=1e-9, atol=1e-10)
