"""Whether training steps on a device are right: equal to the reference, never waited for, and the same in a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

import crossbn
from crossbn import ops
from crossbn.lab.check.finding import Finding
from crossbn.lab.models import find_model

TOLERANCE = 2e-3
"""Of what has come of a few steps in float32, relative to the largest value."""
_STEPS = 4
OPERATORS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), (3, 9, 8)),
    "pointwise": (lambda: nn.Conv2d(12, 20, 1, bias=False), (12, 6, 5)),
    "depthwise": (lambda: nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), (12, 6, 5)),
    "groups, large": (lambda: nn.Conv2d(80, 100, 3, groups=2, bias=False), (80, 6, 6)),
    "large": (lambda: nn.Conv2d(64, 70, 3, padding=1, bias=False), (64, 6, 5)),
    "reflected": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect", bias=False), (4, 6, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, bias=False), (6, 4, 3)),
    "one dimension": (lambda: nn.Conv1d(4, 8, 3, bias=False), (4, 12)),
    "three dimensions": (lambda: nn.Conv3d(3, 6, 2, bias=False), (3, 4, 5, 3)),
    "linear": (lambda: nn.Linear(20, 8, bias=False), (20,)),
    "bias": (lambda: nn.Conv2d(3, 16, 3), (3, 9, 8)),
}
"""Operators, each with the shape of an example."""


def operators(device: torch.device) -> Finding:
    """Train each kind of operator with its norm, and compare with the reference in float64 on the CPU."""
    worst: dict[str, float] = {}
    for name, (make, shape) in OPERATORS.items():
        torch.manual_seed(0)
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)]
        operator = make()
        channels = getattr(operator, "out_channels", None) or operator.get_parameter("weight").shape[0]
        model = nn.Sequential(operator, norm(channels))
        crossbn.convert_(model, window=3)
        with ops.library.switched_off():
            expected = _trained(copy.deepcopy(model).double(), shape, torch.device("cpu"), torch.float64)
        with _exact_products():
            got = _trained(model.to(device), shape, device, torch.float32)
        worst[name] = max(_error(got[key], value) for key, value in expected.items())
    wrong = [f"{name} ({error:.1g})" for name, error in worst.items() if not error <= TOLERANCE]
    told = f"off by more than {TOLERANCE}: {', '.join(wrong)}" if wrong else f"{len(worst)} operators agree"
    return Finding(not wrong, f"{told}, worst {max(worst.values()):.1g}", worst)


def _trained(model: nn.Module, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return parameters, running statistics and history after a few steps."""
    for step in range(_STEPS):
        images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model.zero_grad()
        model(images.to(device, dtype)).pow(3).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.05)
    state = {**model.state_dict(), **crossbn.history_state(model)}
    return {name: each.detach().double().cpu() for name, each in state.items()}


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


@contextmanager
def _exact_products() -> Iterator[None]:
    """Let products of float32 be products of float32: a card may round their factors, ours and torch's alike."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def synchronizations(device: torch.device) -> Finding:
    """Take steady steps of a ResNet-18 where waiting for the device raises; without a GPU on `meta`, without values."""
    place = device if device.type == "cuda" else torch.device("meta")
    with torch.device(place):
        model = find_model("resnet18")().train()
        images = torch.ones(2, 3, 64, 64)
    crossbn.convert_(model, window=3)

    def step() -> None:
        model(images).sum().backward()

    step()
    step()
    with _waiting_is_an_error() if place.type == "cuda" else nullcontext():
        step()
        crossbn.set_window_(model, 4)
        step()
    by = "" if place.type == "cuda" else " (on meta, where nothing has a value)"
    return Finding(True, f"two steps of ResNet-18 and a change of the window wait for nothing{by}")


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(device: torch.device) -> Finding:
    """Capture a training step in a CUDA graph, replay it on new images, and compare with steps that are not in one."""
    if device.type != "cuda":
        return Finding(None, "there are no CUDA graphs on this device")
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, bias=False)
    model = nn.Sequential(*layers, nn.BatchNorm2d(64)).to(device)
    crossbn.convert_(model, window=3)
    eager, images = copy.deepcopy(model), torch.randn(2, 3, 12, 12, device=device)

    def step(network: nn.Module, given: Tensor) -> Tensor:
        network.zero_grad(set_to_none=True)
        output: Tensor = network(given)
        output.pow(3).mean().backward()
        return output

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, images)
    torch.cuda.current_stream(device).wait_stream(side)
    for _ in range(3):
        step(eager, images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(model, images)
    errors = []
    for _ in range(3):
        images.copy_(torch.randn_like(images))
        graph.replay()
        expected = step(eager, images)
        pairs = [(replayed, expected), *zip(model.buffers(), eager.buffers(), strict=True)]
        pairs += [(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True)]  # type: ignore[misc]  # they are there
        errors.append(max(_error(a.detach().double(), b.detach().double()) for a, b in pairs))
    worst = max(errors)
    return Finding(worst <= TOLERANCE, f"three replays are off by {worst:.1g} at most", {"worst": worst})
