"""The plain training loop of everything that is not a recipe: SGD, a step at a time."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.lab.progress import Progress, Watch

Batch = tuple[Tensor, Tensor]
"""Images [N, C, H, W] and their classes [N]."""


def draw(images: int, batch_size: int) -> Iterator[Tensor]:
    """Yield the numbers of the images of each batch without end, in an order that torch's random numbers decide.

    Images that do not fill a batch are left out until the next pass.
    """
    while True:
        yield from torch.randperm(images)[: images // batch_size * batch_size].split(batch_size)


def cross_entropy(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Return the cross-entropy of what a classifier says of images."""
    return F.cross_entropy(model(images), classes)


@dataclass
class Training:
    """A model that is trained by SGD, for as many steps as somebody calls `step`.

    Attributes:
        model: on the device that it is trained on.
        steps: how many there will be.
        learning_rate: at the beginning.
        momentum: of SGD.
        weight_decay: on all parameters.
        falls: whether the learning rate falls linearly, to 0 after the last step.
        loss: of the model, an input and its target.
        watch: told of every step.
        losses: of the steps so far.
        seconds: of the steps so far, without the wait for their images.
    """

    model: nn.Module
    steps: int
    learning_rate: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    falls: bool = True
    loss: Callable[[nn.Module, Any, Any], Tensor] = cross_entropy
    watch: Watch = lambda _: None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = list(self.model.parameters())
        self.device = parameters[0].device
        self.optimizer = torch.optim.SGD(parameters, self.learning_rate, self.momentum, weight_decay=self.weight_decay)
        end = 0.0 if self.falls else 1.0
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, end, total_iters=self.steps)

    def step(self, batch: tuple[Any, Any]) -> None:
        """Train on a batch, an input and its target; tensors are brought to the model's device."""
        given, target = (each.to(self.device) if isinstance(each, Tensor) else each for each in batch)
        started = time.perf_counter()
        loss = self.loss(self.model, given, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # which waits for the device
        self.seconds.append(time.perf_counter() - started)
        self.schedule.step()
        self.watch(Progress(len(self.losses) / self.steps, f"loss {self.losses[-1]:.3f}"))

    @property
    def final_loss(self) -> float:
        """The mean over the last tenth of the steps; nan if one of them is."""
        return fmean(self.losses[-max(1, self.steps // 10) :])


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the share of images that a model classifies correctly in evaluation mode, and how many there were.

    The model is left training.
    """
    model.eval()
    device = next(model.parameters()).device
    correct = tested = 0
    for images, classes in batches:
        correct += int((model(images.to(device)).argmax(1).cpu() == classes).sum())
        tested += len(classes)
    model.train()
    return correct / tested, tested
