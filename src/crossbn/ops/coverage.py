"""Which steps have an implementation of their own on a device, and why others are left to the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn.functional import Settings, Storage
from crossbn.torch_internals import is_tracing


def why_reference(
    storage: Storage | None, settings: Settings, operators: int, has_bias: bool, is_complete: bool
) -> str | None:
    """Say why no device has an implementation of such a step; None for the usual case, which each has."""
    reasons = {
        "nothing is compensated": storage is None,
        f"{operators} operators are summed": operators > 1,
        "its operator has a bias": has_bias,
        "something is added to its operator's output": not is_complete,
        f"order={settings.order}": settings.order != 1,
        f'invalid="{settings.invalid}"': settings.invalid != "max",
        f'backward="{settings.backward}"': settings.backward != "through",
        "sync=True": settings.sync,
        "positions=None": storage is not None and storage.positions is None,
        "history_dtype": settings.history_dtype is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class Way(NamedTuple):
    """How a norm's training steps are done, for a run of its channels."""

    norm: str
    channels: int
    device: str
    implementation: str  # "C", "Triton" or "torch"
    reason: str  # why it is torch's operators, else empty

    def __str__(self) -> str:
        return f"{self.norm}: {self.channels} channels on {self.device} by {self.implementation}" + (
            f", because {self.reason}" if self.reason else ""
        )


def ways_of(model: nn.Module, find: Any) -> Iterator[Way]:
    """Yield how each norm of `model` takes its steps; `find` says it of a storage, its settings and a tensor."""
    for name, norm in model.named_modules():
        for segment in getattr(norm, "segments", ()):
            known: Tensor = segment.history["mean"]
            if segment.window == 1:
                yield Way(name, segment.channels, known.device.type, "torch", "nothing is pooled: it is BatchNorm")
                continue
            told = len(segment.operators), segment.has_bias, segment.direct or len(norm.segments) == 1
            why = why_reference(segment.storage, segment.settings, *told)
            implementation, reason = ("torch", why) if why else find(segment.storage, segment.settings, known)
            yield Way(name, segment.channels, known.device.type, implementation, reason or "")


def is_traced() -> bool:
    """Tell whether something is being traced, which no implementation of ours can be."""
    return torch.compiler.is_compiling() or is_tracing()
