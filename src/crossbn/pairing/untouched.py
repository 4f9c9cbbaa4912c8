"""Look at a model by running its code, and leave nothing behind."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run a model's code without lasting effect: attributes, buffers, random state and warnings.

    Inside, buffers are copies, so the model's own are never written to. Afterwards every module has the
    attributes it had before, training flags included. Not covered: scripted submodules, which keep their state
    out of reach, and hooks, which whoever adds them takes off again.
    """
    plain_modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [dict(vars(module)) for module in plain_modules]
    with ExitStack() as stack:
        stack.enter_context(_random_state_kept(model))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.no_grad())
        warnings.simplefilter("ignore")
        try:
            _copy_buffers(plain_modules)
            yield
        finally:
            for module, before in zip(plain_modules, attributes, strict=True):
                vars(module).clear()
                vars(module).update(before)


def _copy_buffers(plain_modules: list[nn.Module]) -> None:
    copies: dict[int, torch.Tensor] = {}  # by id, so that a buffer shared by two modules stays shared
    for module in plain_modules:
        vars(module)["_buffers"] = {
            name: buffer if buffer is None else copies.setdefault(id(buffer), buffer.clone())
            for name, buffer in module._buffers.items()
        }


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")  # its state can only have been touched if something imported it
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
