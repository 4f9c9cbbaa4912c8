"""Gradient accumulation: the statistics of the whole accumulated batch, from micro-batches of two.

    python examples/accumulation.py [--toy]

BatchNorm at 32 is the goal. With BatchNorm, accumulating sixteen micro-batches of two gives the gradient of 32 images,
but the statistics of two. CBN pools micro-batches, between which the weights do not change at all. The last maps here
are one pixel, which is hardest for BatchNorm. Where maps are large, two images have pixels enough.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import crossbn

BATCH = 32


def make_network() -> nn.Sequential:
    """Return a small network whose last maps are one pixel, the same at every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for in_channels, channels in ((1, 16), (16, 32), (32, 32)):
        conv = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def train(network: nn.Module, images: Tensor, classes: Tensor, micro_batch: int, epochs: int) -> None:
    """Train on batches of 32 images, which are accumulated from micro-batches."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(images))[: len(images) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            for part in batch.split(micro_batch):
                loss = F.cross_entropy(network(images[part]), classes[part])
                (loss * len(part) / BATCH).backward()
            optimizer.step()


def main() -> None:
    """Train at 32 and accumulated, with BatchNorm and CBN."""
    parser = argparse.ArgumentParser(description="Gradient accumulation with BatchNorm and CBN")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="two epochs")
    args = parser.parse_args()
    epochs = 2 if args.toy else args.epochs
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    classes = torch.as_tensor(digits.target)
    for name, micro_batch in (("BN", BATCH), ("BN", args.micro_batch), ("CBN", args.micro_batch)):
        network = make_network()
        if name == "CBN":
            crossbn.convert_(network, batch_size=micro_batch)
        train(network, images[:1200], classes[:1200], micro_batch, epochs)
        with torch.no_grad():
            hits = network.eval()(images[1200:]).argmax(1) == classes[1200:]
        print(f"{name}, micro-batches of {micro_batch}: {100 * hits.float().mean():.1f} %")


if __name__ == "__main__":
    main()
