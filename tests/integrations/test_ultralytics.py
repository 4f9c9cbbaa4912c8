"""The callback for ultralytics; `examples/yolo.py` has a whole training."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from crossbn.convert import cross_iteration_norms
from crossbn.integrations.ultralytics import add_callback


class Model:
    """Keeps callbacks as models of ultralytics do."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[Any], None]] = {}

    def add_callback(self, event: str, function: Callable[[Any], None]) -> None:
        self.callbacks[event] = function


def make_trainer(world_size: int = 1) -> SimpleNamespace:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
    return SimpleNamespace(model=model, batch_size=4, world_size=world_size)


@pytest.mark.parametrize(("options", "window"), [({}, 4), ({"window": 3}, 3), ({"batch_size": 2}, 8)])
def test_converts_what_is_trained(options: dict[str, int], window: int) -> None:
    model, trainer = Model(), make_trainer()
    add_callback(model, **options)
    assert not cross_iteration_norms(trainer.model)
    model.callbacks["on_pretrain_routine_end"](trainer)
    assert cross_iteration_norms(trainer.model)["1"].settings.window == window


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        add_callback(Model(), window=0)


def test_several_devices_are_refused() -> None:
    model, trainer = Model(), make_trainer(world_size=2)
    add_callback(model)
    with pytest.raises(ValueError, match="one device, not on 2"):
        model.callbacks["on_pretrain_routine_end"](trainer)
    assert not cross_iteration_norms(trainer.model)
