"""A network in training, looked at now and then for how its statistics depend on earlier layers' weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from crossbn.compat import ensure_torchvision
from crossbn.lab.experiments.estimates import count_forward_flops, measure_flops_per_second
from crossbn.lab.experiments.pictures import CLASSES, Batch, batches
from crossbn.lab.experiments.tasks import News, Task, Values
from crossbn.lab.fidelity.gradients import average_ratios, gradient_norms

# A projection goes back through three layers, weights and inputs: in forward passes, for both moments.
_FORWARDS_A_PROBE = 2 * 3 * 2
# Real networks against the convolution that the speed is taken from: norms, activations, the optimizer.
_OVERHEAD = 2.0


def train_and_look(task: Task, watch: Callable[[News], None], _: Path | None = None) -> Values:
    """Train with SGD, with a learning rate that falls linearly to 0, and look before, on the way and at the end.

    Each look is at the batch that comes next, with the weights of that moment.
    """
    settings: Any = task.settings
    torch.manual_seed(task.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_network(settings["model"], CLASSES[settings["data"]], settings["head"]).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), settings["learning_rate"], settings["momentum"], weight_decay=settings["weight_decay"]
    )
    steps = settings["steps"]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    due = {round(steps * look / settings["looks"]) for look in range(settings["looks"] + 1)}
    supply = batches(settings["data"], settings["image_size"], settings["batch_size"])
    looks, losses = [], []
    for step, (images, classes) in enumerate(supply):
        batch = images.to(device), classes.to(device)
        if step in due:
            looks.append({"step": step, **_look(model, batch, settings["probes"], task.seed)})
        if step == steps:
            break
        losses.append(_train_step(model, batch, optimizer))
        schedule.step()
        watch(News((step + 1) / steps, f"loss {losses[-1]:.3f}"))
    last = losses[-max(1, steps // 10) :]
    return {"looks": looks, "final_loss": sum(last) / len(last)}


def _look(model: nn.Module, batch: Batch, probes: int, seed: int) -> dict[str, Any]:
    found = gradient_norms(model, batch[0], probes=probes, generator=torch.Generator().manual_seed(seed))
    return {"layers": len(found), **average_ratios(found)._asdict()}


def _train_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def build_network(name: str, classes: int, head: str = "own") -> nn.Module:
    """Return one of torchvision's classifiers with BatchNorm, weights at random.

    Args:
        name: as torchvision has it.
        classes: to tell apart.
        head: "own", or "pooled" to replace VGG's three large linear layers by a mean over space and one small one. No
            norm is among them, and for small images they would be nearly all of the work.
    """
    ensure_torchvision()
    from torchvision import models

    options: dict[str, Any] = {"init_weights": True, "aux_logits": False} if name == "inception_v3" else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    if head == "pooled":
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Linear(512, classes)
    return model


def estimate_training_seconds(task: Task) -> float:
    """Return about how long a run takes: three forward passes a step, and the projections."""
    settings: Any = task.settings
    build = partial(build_network, settings["model"], CLASSES[settings["data"]], settings["head"])
    forward = settings["batch_size"] * count_forward_flops(build, (3, settings["image_size"], settings["image_size"]))
    looks = (settings["looks"] + 1) * settings["probes"] * _FORWARDS_A_PROBE
    return _OVERHEAD * forward * (3 * settings["steps"] + looks) / measure_flops_per_second(1)
