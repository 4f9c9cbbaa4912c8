"""Plain PyTorch with FSDP2: convert, shard, train, save with the history of each process, and resume.

    torchrun --nproc-per-node 2 examples/fsdp.py [--toy]

It runs on GPUs with NCCL and without any on gloo. With 16 images or more in each process CBN is BatchNorm, and where
processes are connected fast enough SyncBatchNorm does as well.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import crossbn

BATCH = 2


def make_network() -> nn.Sequential:
    """Return blocks of convolution, norm and ReLU with a linear layer."""
    blocks = []
    for in_channels, channels in ((3, 16), (16, 32), (32, 64)):
        conv = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        blocks.append(nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU()))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def make_training(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Convert first, then shard: each block by itself, the rest with the network."""
    torch.manual_seed(0)
    network = make_network().to(device)
    crossbn.convert_(network, batch_size=BATCH)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in network[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network, torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Take a step on each batch; return this process's losses."""
    losses = []
    for images, classes in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_checkpoint(network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the sharded states, and what the norms of this process remember under a name of its own."""
    weights, states = get_state_dict(network, optimizer)
    save({"network": weights, "optimizer": states}, checkpoint_id=folder)
    torch.save(crossbn.history_state(network), folder / f"history-{dist.get_rank()}.pt")


def load_checkpoint(network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read them again, the history last."""
    weights, states = get_state_dict(network, optimizer)
    saved = {"network": weights, "optimizer": states}
    load(saved, checkpoint_id=folder)
    set_state_dict(network, optimizer, model_state_dict=saved["network"], optim_state_dict=saved["optimizer"])
    history = torch.load(folder / f"history-{dist.get_rank()}.pt", weights_only=True)
    crossbn.load_history_state(network, history)


def main() -> None:
    """Train, save in the middle, go on; then resume from the middle and see the same losses."""
    parser = argparse.ArgumentParser(description="FSDP2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("fsdp-checkpoint"))
    parser.add_argument("--toy", action="store_true", help="twelve steps")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    random = torch.Generator().manual_seed(dist.get_rank())  # other images in each process
    batches = []
    for _ in range(12 if args.toy else args.steps):
        classes = torch.randint(0, 10, (BATCH,), generator=random)
        images = torch.randn(BATCH, 3, 32, 32, generator=random) + classes[:, None, None, None] / 5
        batches.append((images.to(device), classes.to(device)))
    middle = len(batches) // 2
    network, optimizer = make_training(device)
    train(network, optimizer, batches[:middle])
    save_checkpoint(network, optimizer, args.output)
    losses = train(network, optimizer, batches[middle:])
    network, optimizer = make_training(device)
    load_checkpoint(network, optimizer, args.output)
    resumed = train(network, optimizer, batches[middle:])
    print(
        f"process {dist.get_rank()}: last loss {losses[-1]:.6f}, resumed {resumed[-1]:.6f}, equal: {losses == resumed}"
    )
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    if device == "cpu":
        os._exit(0)  # torch 2.13 may abort, rarely, while gloo's threads end with the interpreter


if __name__ == "__main__":
    main()
