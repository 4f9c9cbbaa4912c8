"""A few seconds of `tools/fuzz.py`, and mistakes that it has to notice."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.nn import CrossIterBatchNorm
from crossbn.ops import library

SEEDS = range(32)


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    path = Path(__file__).parents[1] / "tools" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz_tool", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["fuzz_tool"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz_tool"]


@pytest.mark.parametrize("first", SEEDS[::8])
def test_compiled_code_and_torch_agree(fuzz: ModuleType, first: int) -> None:
    assert library.is_available()  # else torch is compared with itself
    for seed in range(first, first + 8):
        steps, _, problem = fuzz.examine(seed)
        assert not problem, f"python tools/fuzz.py --seed {seed} --cases 1\n{problem}"
        assert steps > 0


def test_a_seed_is_a_case(fuzz: ModuleType) -> None:
    before = torch.get_rng_state()
    first, again, other = fuzz.Case(3), fuzz.Case(3), fuzz.Case(4)
    assert first.description == again.description != other.description
    assert all(map(torch.equal, first.model.state_dict().values(), again.model.state_dict().values()))
    torch.set_rng_state(before)
    assert fuzz.examine(3)[:2] == fuzz.examine(3)[:2]
    assert torch.equal(torch.get_rng_state(), before)


def scale_output(_norm: nn.Module, y: Tensor) -> Tensor:
    return y * 1.001


def scale_gradient(_norm: nn.Module, y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 1.001)
    return y


def move_running(norm: nn.Module, y: Tensor) -> Tensor:
    for name, buffer in norm.named_buffers():
        if name == "running_var" and norm.training:
            buffer *= 1.001
    return y


def scale_history(norm: nn.Module, y: Tensor) -> Tensor:
    state = crossbn.history_state(norm)
    crossbn.load_history_state(norm, {n: 1.001 * v if n.endswith("/var") else v for n, v in state.items()})
    return y


MISTAKES = {"output": scale_output, "gradient": scale_gradient, "buffer": move_running, "history": scale_history}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_noticed(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Norms whose results are slightly off where compiled code is in use, and only there."""
    forward, mistake = CrossIterBatchNorm.forward, MISTAKES[kind]

    def mistaken(norm: CrossIterBatchNorm, x: Tensor) -> Tensor:
        y = forward(norm, x)
        return mistake(norm, y) if library.is_available() else y

    monkeypatch.setattr(CrossIterBatchNorm, "forward", mistaken)
    # Not every case has a norm that the mistake touches.
    assert any(f": {kind} " in fuzz.examine(seed)[2] for seed in range(5))
