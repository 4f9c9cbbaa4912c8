"""What tests of several parts build, train and compare."""

import copy
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.history import History
from crossbn.ops import library


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers: equal ones for equal seeds, in all types but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what `train` trains on at a step, [2, 3, 8, 8]."""
    return draw(step, 2, 3, 8, 8, dtype=dtype)


def conv_norm(*after: nn.Module, conv: nn.Module | None = None) -> nn.Sequential:
    """Return "conv", from 3 to 8 channels, its "norm", and what comes after; equal ones at each call."""
    torch.manual_seed(0)
    layers = {"conv": conv or nn.Conv2d(3, 8, 3, bias=False), "norm": nn.BatchNorm2d(8)}
    return nn.Sequential(OrderedDict(layers)).extend(after)


def converted(*after: nn.Module, conv: nn.Module | None = None, **options: Any) -> nn.Sequential:
    """Return the same with a cross-iteration norm, whose window is 4 unless told."""
    model = conv_norm(*after, conv=conv)
    crossbn.convert_(model, **{"window": 4, **options})
    return model


def last_pooled(wide: bool = False, **options: Any) -> nn.Sequential:
    """Return an operator and a norm whose running statistics are the last pooled ones; wide ones remember samples."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 70 if wide else 3, 3 if not wide else (3, 79), padding=(0, 40 if wide else 0), bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels, momentum=1.0)).double()
    crossbn.convert_(model, window=4, **options)
    return model


class Standardized(nn.Conv2d):
    """Reads another weight than it shows: whatever the scale of that, its output is the same."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution with each channel's weight at a standard deviation of 1."""
        weight = self.weight / self.weight.flatten(1).std(1).reshape(-1, 1, 1, 1)
        return F.conv2d(x, weight, self.bias)


def norm_of(model: nn.Module, name: str = "1") -> CrossIterBatchNorm:
    """Return the norm of that name, a cross-iteration one."""
    norm = model.get_submodule(name)
    assert isinstance(norm, CrossIterBatchNorm)
    return norm


def history_of(model: nn.Module, name: str = "1") -> History:
    """Return what the norm of that name remembers of its first, or only, segment."""
    return norm_of(model, name).segments[0].history


def train(model: nn.Module, steps: Iterable[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Train by plain gradient descent, which has no state of its own; return the outputs."""
    outputs = []
    for step in steps:
        model.zero_grad()
        out = model(batch(step, dtype))
        out.sin().sum().backward()
        outputs.append(out.detach())
        descend_(model)
    return outputs


@torch.no_grad()
def descend_(model: nn.Module, rate: float = 0.01) -> None:
    """Move all parameters down their gradients."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=rate)


@torch.no_grad()
def move_(parameters: Iterable[Tensor], size: float = 0.05) -> None:
    """Move parameters by random steps, as a training would."""
    for parameter in parameters:
        parameter.add_(torch.randn_like(parameter), alpha=size)


@torch.no_grad()
def move_alike_(model: nn.Module, *twins: nn.Module, size: float = 0.05) -> None:
    """Move a model's parameters by random steps, and give its twins the same."""
    move_(model.parameters(), size)
    for twin in twins:
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.copy_(ours)


def by_pickle(model: nn.Module) -> nn.Module:
    """Return a copy of a model."""
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def steps_pushed(model: nn.Module) -> int:
    """Return how many steps have been remembered since the beginning, by all norms together."""
    return sum(int(value) for key, value in crossbn.history_state(model).items() if key.endswith("/pushed"))


def history_is_finite(model: nn.Module) -> bool:
    """Return whether everything that is remembered is finite."""
    return all(bool(value.isfinite().all()) for value in crossbn.history_state(model).values())


def assert_same(got: Any, expected: Any) -> None:
    """Compare tensors, or lists or dictionaries of them, bit for bit."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def compiled_code(on: bool) -> AbstractContextManager[None]:
    """Return a context in which steps on the CPU are done by compiled code, or by torch's operators."""
    return nullcontext() if on else library.switched_off()


def run_python(*words: str | Path, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Run Python in a process with these variables beside its own; return what it printed, or fail with its errors."""
    command, environment = [sys.executable, *map(str, words)], {**os.environ, **(variables or {})}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def functional_form(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a linear operator as a function of its input and weight, without bias."""
    plain = copy.deepcopy(module).double()
    plain._forward_hooks.clear()  # they belong to the layer under test
    plain.register_parameter("bias", None)

    def call(y: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(plain, {"weight": weight}, (y,))
        return output

    return call
