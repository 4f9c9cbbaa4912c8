"""Run a model's code and leave nothing behind."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Let the model's code run without lasting effect on attributes, buffers, hooks, random state and warnings.

    Inside, buffers are copies, so the model's own are never written to. Afterwards every module has the attributes it
    had before, training flags included, and no hook that was added inside. Scripted submodules are not covered: they
    keep their state out of reach.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [dict(vars(module)) for module in modules]
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}  # A buffer shared by two modules stays shared.
    with _random_state_kept(model), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            for module in modules:
                buffers = {name: copies.get(id(buffer)) for name, buffer in module._buffers.items()}
                hooks = {key: copy.copy(value) for key, value in vars(module).items() if key.startswith("_forward_")}
                vars(module).update(hooks, _buffers=buffers)
            yield
        finally:
            for module, before in zip(modules, attributes, strict=True):
                vars(module).clear()
                vars(module).update(before)


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")  # Its state can only be touched if something has imported it.
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
