"""A small network in training, to be looked at."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import crossbn

BATCH = 3


def network(**options: Any) -> nn.Sequential:
    """Two convolutions, the first with a bias, each with its norm: layers 1 and 4."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    crossbn.convert_(model, **{"weights": "equal", **options})
    return model


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 2, 8, 8, generator=torch.Generator().manual_seed(step))


def trainer(model: nn.Module, lr: float = 0.1) -> Callable[[Tensor], Tensor]:
    """Return a function that does a training step and returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x.mean((1, 2, 3)).gt(0).long())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def train(model: nn.Module, batches: Iterable[Tensor], lr: float = 0.1) -> list[Tensor]:
    return [step(x) for step in [trainer(model, lr)] for x in batches]
