"""Two processes on gloo, and what they train."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from tests.processes import METHOD

WORLD = 2
Log = list[dict[str, Tensor]]


def run_processes(worker: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a function with the number of its process and these arguments in each of them, until all have ended."""
    start_processes(worker, arguments, nprocs=WORLD, start_method=METHOD)


@contextmanager
def process_group(rank: int, folder: str) -> Iterator[None]:
    """Join the other process for as long as the context lasts, with which the process ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    yield
    dist.destroy_process_group()
    os._exit(0)  # taken apart, DDP over gloo may wait for itself: its thread for Python's lock, Python for its thread


def data(step: int, sizes: tuple[int, ...], *shape: int) -> list[Tensor]:
    """Return the images of each process at a step, so many of them."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(n, *shape, generator=generator, dtype=torch.float64) + rank for rank, n in enumerate(sizes)]


def train(model: nn.Module, core: nn.Module, batches: Iterable[Tensor], scale: float) -> Log:
    """Train with a loss that is a sum over examples, of 6 channels; log outputs and the core's state."""
    optimizer = torch.optim.SGD(core.parameters(), 0.02)
    log: Log = []
    for x in batches:
        optimizer.zero_grad()
        out = model(x)
        (out.sin() * torch.linspace(0, 1, 6, dtype=torch.float64).reshape(6, 1, 1)).sum().mul(scale).backward()
        optimizer.step()
        log.append({"out": out.detach(), **{name: value.clone() for name, value in core.state_dict().items()}})
    return log
