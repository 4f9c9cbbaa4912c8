"""Run a model's code and leave nothing behind."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Let the model's code run without lasting effect on attributes, buffers, hooks, random state and warnings.

    Inside, buffers are copies, so the model's own are never written to. Afterwards every module has the attributes it
    had before, training flags included, and no hook that was added inside. Scripted submodules are not covered: they
    keep their state out of reach.
    """
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}  # A buffer shared by two modules stays shared.
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:  # Its state can only change if something has imported it.
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.no_grad())
        warnings.simplefilter("ignore")
        for module in [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]:
            stack.callback(vars(module).update, dict(vars(module)))
            stack.callback(vars(module).clear)  # This runs first: the last callback is the first to be called.
            hooks = {key: copy.copy(value) for key, value in vars(module).items() if key.startswith("_forward_")}
            buffers = {name: copies.get(id(buffer)) for name, buffer in module._buffers.items()}
            vars(module).update(hooks, _buffers=buffers)
        yield
