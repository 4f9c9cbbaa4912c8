"""How many launches, how much time and how much memory cross-iteration norms cost on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import DeviceType, ProfilerActivity, profile

import crossbn
from crossbn import ops
from crossbn.lab.check.finding import Finding
from crossbn.lab.cost.memory import peak_above_start
from crossbn.lab.cost.timing import Precision, Timing, clock_of, interleave
from crossbn.lab.models import find_model
from crossbn.schedules import window_for

MOST_LAUNCHES = 20
"""A norm more than BatchNorm: 12 are meant, and some of torch's operators launch several kernels."""
MOST_TIME = 2.0
"""Of BatchNorm's step on a GPU. A norm that doubles the step is not used."""
_NORMS = ("bn", "gn", "cbn")
_BATCHES = (1, 2, 4)


def _step_of(name: str, norm: str, batch: int, size: int, device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = find_model(name)().to(device).train()
    if norm == "cbn":
        crossbn.convert_(model, window=window_for(batch))
    elif norm != "bn":
        crossbn.swap_norm_(model, norm)
    images = torch.randn(batch, 3, size, size, device=device)

    def step() -> None:
        model.zero_grad()
        model(images).sum().backward()

    return model, step


def launches(device: torch.device) -> Finding:
    """Count the kernels that a steady step of ResNet-18 launches; on the CPU torch's operators that do work."""
    is_cuda, counts = device.type == "cuda", dict[str, float]()
    for norm in ("bn", "cbn"):
        model, step = _step_of("resnet18", norm, 2, 64, device)
        for _ in range(9 if is_cuda else 2):  # a full window, and what is compiled is compiled
            step()
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
            step()
            if is_cuda:
                torch.cuda.synchronize(device)
        events = seen.events() or []
        if is_cuda:
            found = [each for each in events if each.device_type == DeviceType.CUDA]
        else:
            found = [each for each in events if each.name.startswith("aten::") and not each.cpu_children]
        counts[norm] = len(found)
    ways = Counter(way.implementation for way in ops.explain(model))
    more = (counts["cbn"] - counts["bn"]) / ways.total()
    told = ", ".join(f"{count} by {implementation}" for implementation, count in ways.items())
    sentence = (
        f"{more:.1f} a norm more than BatchNorm's ({counts['cbn']:.0f} and {counts['bn']:.0f} a step); norms: {told}"
    )
    return Finding(not is_cuda or more <= MOST_LAUNCHES, sentence, {**counts, "more a norm": more})


def cost(device: torch.device) -> Finding:
    """Measure a step of ResNet-18 and ResNet-50 with BN, GN and CBN: time and peak memory beside BatchNorm's."""
    is_cuda = device.type == "cuda"
    size, rounds = (224, Precision(10, 0.05, 6.0)) if is_cuda else (64, Precision(6, 1e9, 0.0))
    values: dict[str, float] = {}
    for name in ("resnet18", "resnet50"):
        for batch in _BATCHES:
            steps = {norm: _step_of(name, norm, batch, size, device)[1] for norm in _NORMS}
            same = dict.fromkeys(_NORMS, "bn")
            seconds = interleave(steps, same, warm_up=9 if is_cuda else 2, precision=rounds, clock=clock_of(device))
            peaks = {norm: peak_above_start(step, device) for norm, step in steps.items()}
            for norm in _NORMS[1:]:
                ratio = Timing.of(seconds[norm], seconds["bn"]).ratio
                values[f"{name}, batch {batch}, {norm}, time"] = ratio
                values[f"{name}, batch {batch}, {norm}, memory"] = peaks[norm] / peaks["bn"]
    times, memory = ([v for k, v in values.items() if k.endswith(f"cbn, {kind}")] for kind in ("time", "memory"))
    told = f"a step of CBN takes {min(times):.2f} to {max(times):.2f} of BN's time"
    told += f" and {min(memory):.2f} to {max(memory):.2f} of its memory, at {size} px"
    return Finding(not is_cuda or max(times) <= MOST_TIME, told, values)
