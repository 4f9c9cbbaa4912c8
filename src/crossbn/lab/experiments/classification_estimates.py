"""How long a training of a classifier takes: its arithmetic, and what norms and the engine add to each step."""

from functools import cache
from typing import Any, NamedTuple

from crossbn.lab.data import DATASETS
from crossbn.lab.experiments.classification import count_images, pool_head
from crossbn.lab.experiments.estimates import count_forward_flops, measure_flops_per_second
from crossbn.lab.models import build_network, is_small
from crossbn.lab.records import Task

# Taken from steps of the small network on one core: what a norm adds to a step beside its network's arithmetic, the
# calls of its operator included, and what the engine does.
_SECONDS_A_NORM = {"brn": 7e-4, "naive_cbn": 1.3e-3, "cbn": 1.1e-3}
_SECONDS_A_PLAIN_NORM, _SECONDS_A_STEP = 4e-4, 1.5e-3
_SECONDS_A_PARAMETER = 5e-9  # of the optimizer
# Small convolutions against the one that the speed is taken from.
_OVERHEAD = 1.7
_FORWARDS_A_STEP = 3


def estimate_seconds(task: Task) -> float:
    """Return about how long a run takes on one core: its steps, and the tests on the way."""
    settings: Any = task.settings
    size = _measure(*(settings[name] for name in ("model", "width", "head", "data", "image_size")))
    train = count_images(settings["data"], settings["train_images"])
    test = count_images(settings["data"], settings["test_images"], train=False)
    steps = settings["epochs"] * (train // settings["batch_size"])
    alone = settings["burn_in_epochs"] / settings["epochs"]  # with the current step only
    seconds_a_forward = _OVERHEAD * size.flops / measure_flops_per_second(1)
    # Exact statistics let the whole window through the network at each step; other norms the batch.
    batches = alone + (1 - alone) * settings["window"] if settings["gradient"] is not None else 1
    images = settings["batch_size"] * batches
    pooled = _SECONDS_A_NORM.get(settings["norm"], _SECONDS_A_PLAIN_NORM)
    a_norm = alone * _SECONDS_A_PLAIN_NORM + (1 - alone) * pooled
    step = _SECONDS_A_STEP + size.norms * a_norm + size.parameters * _SECONDS_A_PARAMETER
    step += images * _FORWARDS_A_STEP * seconds_a_forward
    return steps * step + (settings["points"] or settings["epochs"]) * test * seconds_a_forward


class _Size(NamedTuple):
    norms: int
    parameters: int
    flops: int
    """Of one image in one forward."""


@cache
def _measure(model: str, width: int, head: str, data: str, image_size: int | None) -> _Size:
    import torch
    from torch import nn

    known = DATASETS[data]
    channels = known.channels if is_small(model) else 3

    def build() -> nn.Module:
        network = build_network(model, channels, known.classes, width)
        return pool_head(network) if head == "pooled" else network

    pixels = image_size or known.image_size
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = build()
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return _Size(norms, parameters, count_forward_flops(build, (channels, pixels, pixels)))
