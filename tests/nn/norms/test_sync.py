"""BatchNorm over two processes on gloo: the joint batch's, forward and backward."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import crossbn

WORLD = 2
BATCHES = [(2, 2), (3, 1), (1, 2), (0, 3), (1, 1)]
"""Examples per process, step by step."""
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


def data(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(n, 3, 3, 3, generator=generator, dtype=torch.float64) + rank for rank, n in enumerate(BATCHES[step])
    ]


def train(model: nn.Module, core: nn.Module, steps: list[Tensor], scale: float) -> list[dict[str, Tensor]]:
    """Train with a loss that is a sum over examples; log outputs and state."""
    optimizer = torch.optim.SGD(core.parameters(), 0.02)
    log = []
    for x in steps:
        optimizer.zero_grad()
        out = model(x)
        (out.sin() * torch.linspace(0, 1, 6, dtype=torch.float64).reshape(6, 1, 1)).sum().mul(scale).backward()
        optimizer.step()
        log.append({"out": out.detach(), **{key: value.clone() for key, value in core.state_dict().items()}})
    return log


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    logs = []
    for options in OPTIONS:
        core = build(**options)
        crossbn.swap_norm_(core, "sync_bn")
        # DDP averages gradients over processes; the loss of the joint batch is their sum.
        model = DistributedDataParallel(core, broadcast_buffers=False)
        logs.append(train(model, core, [data(step)[rank] for step in range(len(BATCHES))], float(WORLD)))
    torch.save(logs, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # taken apart, DDP over gloo may wait for itself: its thread for Python's lock, Python for its thread


@pytest.mark.slow
def test_two_processes_are_one_with_the_joint_batch(tmp_path: Path) -> None:
    spawn(worker, (str(tmp_path),), nprocs=WORLD)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    for options, *logs in zip(OPTIONS, *results, strict=True):
        alone = build(**options)
        expected = train(alone, alone, [torch.cat(data(step)) for step in range(len(BATCHES))], 1.0)
        for want, *got in zip(expected, *logs, strict=True):
            torch.testing.assert_close(torch.cat([log["out"] for log in got]), want["out"], rtol=1e-9, atol=1e-10)
            for log in got:
                for key in want.keys() - {"out"}:
                    torch.testing.assert_close(log[key], want[key], rtol=1e-9, atol=1e-10)
