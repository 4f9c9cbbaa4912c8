"""How many kernels a norm launches on a GPU, counted without one: a training step on `meta`.

What torch dispatches counts as one launch, but for views and what only allocates; a kernel of ours is counted where it
would be launched. BatchNorm's native kernels have no implementation on `meta`: stand-ins count as one, and what they
are given is held against torch's own schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import crossbn
from crossbn import ops
from crossbn.ops import gpu_step, triton

crossbn.compat.ensure_torchvision()
from torchvision import models  # noqa: E402  # after the line before

MOST = 12
"""More than BatchNorm's own, a norm."""
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
}


class Count(TorchDispatchMode):
    """Counts what would be launched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if name not in _FREE and not is_view:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def _stand_in(name: str, count: Count, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called instead of a native function: it takes what that takes, and counts as one launch."""
    expected = getattr(torch.ops.aten, name).default._schema.arguments

    def stand_in(*given: Any) -> Any:
        assert len(given) == len(expected)
        for value, argument in zip(given, expected, strict=True):
            wanted = str(argument.type)
            assert isinstance(value, Tensor) == ("Tensor" in wanted) or (value is None and "Optional" in wanted), (
                argument
            )
        count.names[name] += 1
        return make(*given)

    return stand_in


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Let `meta` be taken for a GPU."""
    found = Count()

    def vectors(x: Tensor, number: int) -> tuple[Tensor, ...]:
        return torch.empty(number, x.shape[1], device=x.device).unbind()

    natives: dict[str, Callable[..., Any]] = {
        "batch_norm_update_stats": lambda x, *_: vectors(x, 2),
        "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
        "batch_norm_backward_reduce": lambda _, x, *__: (*vectors(x, 2), None, None),
        "batch_norm_backward_elemt": lambda _, x, *__: torch.empty_like(x),
    }
    for name, make in natives.items():
        monkeypatch.setattr(torch, name, _stand_in(name, found, make))
    for module in ("functional.moments", "functional.normalize", "ops.gpu_step"):
        monkeypatch.setattr(f"crossbn.{module}.native_available", lambda x: x.is_meta)
    monkeypatch.setattr(gpu_step, "launch", lambda name, *_, **__: found.names.update([f"our {name}"]))
    monkeypatch.setitem(ops.DEVICES, "meta", triton)
    monkeypatch.setattr(triton, "is_installed", lambda: True)
    return found


def launches(make: Callable[[], nn.Module], count: Count, **options: Any) -> tuple[Counter[str], int]:
    """Return what a steady training step launches, and how many norms are cross-iteration ones."""
    with torch.device("meta"):
        model = make().train()
        images = torch.empty(2, 3, 64, 64)
    if options:
        crossbn.convert_(model, **options)
    for _ in range(3):
        count.names.clear()
        with count:
            model(images).sum().backward()
    norms = [module for module in model.modules() if isinstance(module, crossbn.nn.CrossIterBatchNorm)]
    assert {norm.plain_reason for norm in norms} <= {None}
    return Counter(count.names), len(norms)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "densenet121"])
def test_launches_of_a_norm(name: str, count: Count) -> None:
    make = getattr(models, name)
    plain, _ = launches(make, count)
    for window in (2, 8):
        ours, norms = launches(make, count, window=window)
        more = (ours.total() - plain.total()) / norms
        print(f"| {name} | {norms} | {window} | {plain.total()} | {ours.total()} | {more:.1f} |")
        assert 0 < more <= MOST, ours - plain
