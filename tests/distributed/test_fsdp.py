"""Two processes on gloo: sharded parameters train as replicated ones do, and a checkpoint continues the training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import crossbn
from tests.distributed.processes import WORLD, Log, process_group, run_processes

STEPS = 6
STOP = 4  # the window is full and has begun to move on
SAMPLED = {"order": 2, "positions": 16}
Result = dict[str, Any]


class Block(nn.Sequential):
    """A convolution, its norm and an activation."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias), nn.BatchNorm2d(outputs), nn.Tanh())


class Net(nn.Module):
    """Three blocks, with channels that two processes can and cannot share evenly, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 4, bias=True), Block(4, 5, bias=False), Block(5, 6, bias=False))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def build(options: dict[str, Any]) -> Net:
    torch.manual_seed(0)
    model = Net().double()
    crossbn.convert_(model, window=4, **options)
    return model


Units = Callable[[Block], list[nn.Module | list[nn.Module]]]
UNITS: dict[str, Units] = {
    "model": lambda _: [],
    "blocks": lambda block: [block],
    "pairs": lambda block: [[block[0], block[1]]],
    "convolutions": lambda block: [block[0]],
    "layers": lambda block: [block[0], block[1]],
}
"""What is sharded by itself of each block; the model has the rest."""


def shard(model: Net, units: str, **options: Any) -> None:
    """Shard in place: a unit's parameters are gathered for its forward and freed after it, but for the model's own."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        assert isinstance(block, Block)
        for unit in UNITS[units](block):
            fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int = 0, last: int = STEPS) -> Log:
    """Train on each step's data of this process; log the loss and the gradients, whole ones."""
    log: Log = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(WORLD * step + rank)
        x = torch.randn(2, 3, 6, 5, generator=generator, dtype=torch.float64) + rank
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.tensor([step % 3, (step + 1 + rank) % 3]))
        loss.backward()
        grads = {name.removeprefix("module."): gather(p.grad) for name, p in model.named_parameters()}
        log.append({"loss": loss.detach(), **grads})
        optimizer.step()
    return log


def gather(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train_replicated(rank: int, options: dict[str, Any]) -> tuple[Log, dict[str, Tensor]]:
    core = build(options)
    model = DistributedDataParallel(core)
    return train(model, make_optimizer(model), rank), crossbn.history_state(core)


def train_sharded(rank: int, units: str, options: dict[str, Any], sharding: dict[str, Any]) -> Result:
    want, want_history = train_replicated(rank, options)
    model = build(options)
    shard(model, units, **sharding)
    got = train(model, make_optimizer(model), rank)
    return {"got": got, "want": want, "got history": crossbn.history_state(model), "want history": want_history}


def train_with_a_stop(rank: int, folder: str, units: str, options: dict[str, Any]) -> Result:
    want, _ = train_replicated(rank, options)
    model = build(options)
    shard(model, units)
    optimizer = make_optimizer(model)
    train(model, optimizer, rank, last=STOP)
    saved = crossbn.history_state(model)
    save(checkpoint(model, optimizer, rank, saved), checkpoint_id=folder)

    model = build(options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # everything has to come from the checkpoint
    shard(model, units)
    optimizer = make_optimizer(model)
    state = checkpoint(model, optimizer, rank, room_for_history(folder, rank))
    load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    crossbn.load_history_state(model, state[f"history of {rank}"])  # last: loading weights forgets the history
    loaded = crossbn.history_state(model)
    got = train(model, optimizer, rank, first=STOP)
    return {"got": got, "want": want[STOP:], "got history": loaded, "want history": saved}


def checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, history: dict[str, Tensor]
) -> dict[str, Any]:
    """Return what is saved. Of plain tensors that all processes have by one name only one is; histories differ."""
    weights, momenta = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": momenta, f"history of {rank}": history}


def room_for_history(folder: str, rank: int) -> dict[str, Tensor]:
    """Return tensors for a saved history, which may be larger than that of a model that has not trained yet."""
    room, prefix = {}, f"history of {rank}."
    for key, saved in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if key.startswith(prefix):
            assert isinstance(saved, TensorStorageMetadata)
            room[key.removeprefix(prefix)] = torch.empty(saved.size, dtype=saved.properties.dtype)
    return room


def worker(rank: int, folder: str, task: Callable[..., Result], cases: list[tuple[Any, ...]]) -> None:
    with process_group(rank, folder):
        for i, case in enumerate(cases):
            torch.save(task(rank, *case), f"{folder}/{i}.{rank}.pt")


def check(folder: Path, task: Callable[..., Result], *cases: tuple[Any, ...]) -> None:
    """Run `task` on all cases in two processes, which take seconds to start; each must have got what it wanted."""
    run_processes(worker, (str(folder), task, list(cases)))
    for i, case in enumerate(cases):
        results = [torch.load(folder / f"{i}.{rank}.pt", weights_only=True) for rank in range(WORLD)]
        for rank, result in enumerate(results):
            where = f"{case} in process {rank}"
            assert_equal(result["got history"], result["want history"], f"{where}, history")
            assert len(result["got"]) == len(result["want"]) > 0
            for step, (got, want) in enumerate(zip(result["got"], result["want"], strict=True)):
                assert_equal(got, want, f"{where}, step {step}")
            # Equality would say little if nothing was remembered.
            pushed = [int(value) for key, value in result["got history"].items() if key.endswith("/pushed")]
            assert len(pushed) == 3
            assert min(pushed) >= 3
        first, second = (result["got history"]["blocks.0.1/0/mean"] for result in results)
        assert not torch.allclose(first, second)  # each process remembers its own batches


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], where: str) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda text: f"{where}: {text}")


@pytest.mark.slow
def test_sharded_equals_replicated(tmp_path: Path) -> None:
    check(
        tmp_path,
        train_sharded,
        ("model", {}, {}),
        ("model", {}, {"reshard_after_forward": True}),
        ("blocks", {}, {}),
        ("blocks", SAMPLED, {}),
        ("blocks", {}, {"reshard_after_forward": False}),
        ("pairs", {}, {}),
    )


@pytest.mark.slow
def test_weights_that_are_freed_before_the_norm_runs(tmp_path: Path) -> None:
    check(tmp_path, train_sharded, ("convolutions", {}, {}), ("layers", {}, {}), ("layers", SAMPLED, {}))


@pytest.mark.slow
def test_a_checkpoint_continues_the_training(tmp_path: Path) -> None:
    widening = {"order": 2, "positions": None}
    check(
        tmp_path,
        train_with_a_stop,
        (str(tmp_path / "a"), "model", {}),
        (str(tmp_path / "b"), "blocks", {}),
        (str(tmp_path / "c"), "blocks", widening),
    )
