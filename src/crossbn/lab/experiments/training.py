"""One training of the small residual network on digits."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.convert import convert_
from crossbn.lab.experiments.digits import Images, load_digits
from crossbn.lab.experiments.network import residual_network
from crossbn.lab.experiments.records import Point, Record, Run

GROUPS = 8
POINTS_PER_EPOCH = 4


def train(run: Run, watch: Callable[[Point], None] = lambda _: None) -> Record:
    """Do a run: SGD, with a learning rate that falls linearly to 0.

    Args:
        run: what to train, and how.
        watch: called with each point of the curve as soon as it is there.
    """
    torch.manual_seed(run.seed)
    images, test = load_digits(int(run.settings["train_images"]))
    epochs = int(run.settings["epochs"])
    steps = epochs * (len(images.digits) // run.batch_size)
    model = build_model(run)
    optimizer = torch.optim.SGD(model.parameters(), run.settings["learning_rate"], run.settings["momentum"])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    points = epochs * POINTS_PER_EPOCH
    due = {-(-steps * i // points) for i in range(1, points + 1)}  # rounded up: the last one is the last step
    curve = []
    started = time.perf_counter()  # only now: the first optimizer of a process loads much of torch
    for step, batch in enumerate(_batches(len(images.digits), run.batch_size, epochs), start=1):
        loss = F.cross_entropy(model(images.pixels[batch]), images.digits[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in due:
            curve.append(Point(step * epochs / steps, accuracy(model, test)))
            watch(curve[-1])
    return Record(run, tuple(curve), len(test.digits), time.perf_counter() - started)


def build_model(run: Run) -> nn.Sequential:
    """Return the network with the run's norm; equal seeds give equal weights, whatever the norm."""
    if run.norm == "gn":
        return residual_network(lambda channels: nn.GroupNorm(GROUPS, channels))
    model = residual_network(nn.BatchNorm2d)
    if run.norm == "cbn":
        convert_(model, window=run.window)
    return model


def _batches(images: int, batch_size: int, epochs: int) -> Iterator[Tensor]:
    """Yield the indices of each batch; images that do not fill one are left out until the next epoch."""
    for _ in range(epochs):
        order = torch.randperm(images)
        yield from order[: images // batch_size * batch_size].split(batch_size)


@torch.no_grad()
def accuracy(model: nn.Module, test: Images) -> float:
    """Return the share of `test` that `model` classifies correctly in evaluation mode; it is left training."""
    model.eval()
    correct = (model(test.pixels).argmax(1) == test.digits).sum().item()
    model.train()
    return correct / len(test.digits)
