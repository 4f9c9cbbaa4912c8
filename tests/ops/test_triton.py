"""The kernels for a GPU, interpreted on the CPU: on the same table of cases, and in a network of all types."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn import functional as C
from crossbn import ops
from crossbn.ops import gpu_step, triton
from crossbn.ops.types import flat_strides
from tests.ops.cases import (
    CASES,
    OPERATORS,
    Case,
    Situation,
    assert_near,
    expected_of,
    found_in,
    gradients_in,
    remembered,
    situation,
)
from tests.ops.test_devices import check
from tests.support import descend_, draw

STEPS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SPOILT = [name for name in CASES if re.search("infinite|not a number", name)]
_STRANGE = [name for name in CASES if CASES[name].raises]
_OTHERS = [name for name, case in CASES.items() if not case.compiled and name not in _SPOILT] + [
    "lone position, known moments"
]
_USUAL = [name for name in CASES if name not in {*_SPOILT, *_STRANGE, *_OTHERS}]


def stepped(case: Case, dtype: torch.dtype = torch.float32) -> tuple[ops.Outcome | None, Situation]:
    given = situation(case, dtype, DEVICE)
    return triton.step(given.inputs, given.history.past(), given.storage, given.settings), given


@pytest.mark.parametrize("name", _USUAL)
def test_kernels_equal_the_reference(name: str) -> None:
    """Statistics, output, running statistics, history and gradients."""
    case = CASES[name]
    outcome, given = stepped(case)
    assert outcome is not None
    assert (outcome.output is None) == case.known_moments
    gradients = gradients_in(given, outcome.statistics, triton)
    assert len(gradients) == 6
    assert_near(gradients, expected_of(case), torch.float32)
    check(case, given, outcome, torch.float32)


@pytest.mark.parametrize("name", _OTHERS)
def test_other_cases_are_left_to_the_reference(name: str) -> None:
    assert stepped(CASES[name])[0] is None


@pytest.mark.parametrize("name", ["convolution", "patches"])
def test_doubles_are_left_to_the_reference(name: str) -> None:
    assert stepped(CASES[name], torch.float64)[0] is None


@pytest.mark.parametrize("name", [*_SPOILT, *_STRANGE])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of the interpreter
def test_what_is_not_sound_is_batchnorms_and_not_remembered(name: str) -> None:
    """Neither infinity nor the output of another operator is told to Python, which would have to wait for it."""
    case = CASES[name]
    outcome, given = stepped(case)
    assert outcome is not None
    before, x, norm = situation(case, torch.float32), given.inputs.x, given.norm
    mean, var = C.batch_moments(x)
    pooled = {"mean": mean, "var": var, "share": torch.ones_like(mean)}
    if name in _SPOILT:  # nothing times infinity is not a number, in the reference too
        pooled = expected_of(case)
    expected = {**remembered(before.history), **{key: pooled[key].double() for key in ("mean", "var", "share")}}
    assert outcome.commit is not None
    outcome.commit()
    found = {**found_in(outcome.statistics, given.history, given.inputs), **remembered(given.history)}
    assert_near({key: found[key] for key in expected}, expected, torch.float32)
    if outcome.output is not None:
        torch.testing.assert_close(
            outcome.output, F.batch_norm(x, None, None, norm.gamma, norm.beta, True, 0.0, norm.eps), equal_nan=True
        )
        is_finite = bool(var.isfinite().all())
        assert torch.equal(norm.running_mean, before.norm.running_mean) == (not is_finite)
        assert int(norm.num_batches_tracked) == 5 + is_finite


def network() -> nn.Module:
    """One operator of each kind: of a small and of a large weight, depthwise, transposed in groups, and linear."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2, bias=False), nn.BatchNorm2d(4, affine=False)),
        nn.Sequential(nn.Conv2d(4, 80, 3, bias=False), nn.BatchNorm2d(80), nn.ReLU()),
        nn.Sequential(nn.Conv2d(80, 50, 3, bias=False), nn.BatchNorm2d(50), nn.Flatten()),
    )


class Dense(nn.Module):
    """Norms that read concatenations: of what no operator has made, and of operators that feed several norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (3, 7), (7, 5), (8, 30)
        self.norms = nn.ModuleList([nn.BatchNorm2d(10), nn.BatchNorm2d(15), nn.BatchNorm2d(45, affine=False)])
        self.convs = nn.ModuleList([nn.Conv2d(*size, 3, padding=1, bias=False) for size in sizes])
        self.pointwise = nn.Conv2d(10, 7, 1, bias=False)
        self.linear = nn.Conv2d(15, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last norm's output."""
        first, last = F.avg_pool2d(x, 3, 1, 1), self.convs[0](x)
        both = torch.cat([first, last], 1)
        middle = self.convs[1](self.pointwise(F.relu(self.norms[0](both))))
        three = torch.cat([both, middle], 1)
        wide = self.convs[2](self.linear(F.relu(self.norms[1](three))))
        output: Tensor = self.norms[2](torch.cat([three, wide], 1))
        return output


def trained(
    dtype: torch.dtype,
    layout: torch.memory_format,
    narrow: torch.dtype | None = None,
    make: Callable[[], nn.Module] = network,
) -> dict[str, Tensor]:
    """Return parameters, buffers and history of the network after a few steps."""
    model = make().to(DEVICE, dtype, memory_format=layout)  # type: ignore[call-overload]  # torch's types lack it
    crossbn.convert_(model, window=3, positions=8)
    for step in range(STEPS):
        images = draw(step, 3, 3, 6, 6, dtype=torch.float64)
        with torch.autocast(DEVICE, narrow, enabled=narrow is not None):
            loss = model(images.to(DEVICE, dtype, memory_format=layout)).float().pow(3).mean()
        model.zero_grad()
        loss.backward()
        descend_(model, 0.05)
    state = {**model.state_dict(), **crossbn.history_state(model)}
    return {name: each.double().cpu() for name, each in state.items() if each.is_floating_point()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let steps on the CPU be done by kernels, and note which."""
    names: list[str] = []
    launch = gpu_step.launch

    def noted(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        names.append(name)
        launch(name, grid, *arguments, **constants)

    monkeypatch.setattr(gpu_step, "launch", noted)
    monkeypatch.setitem(ops.DEVICES, "cpu", triton)
    return names


_KERNELS = {"gather", "differentiate", "pool", "move_running", "remember"}
_KERNELS |= {"backward_vectors", "row_coefficients", "weight_gradient"}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
def test_a_network_trains_as_with_the_reference_in_float64(layout: torch.memory_format, launched: list[str]) -> None:
    got = trained(torch.float32, layout)
    assert set(launched) == _KERNELS
    assert launched.count("pool") == launched.count("remember") == STEPS * 5  # each norm at each step
    assert_alike(got, trained(torch.float64, torch.contiguous_format), 1e-3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
def test_concatenations_train_as_with_the_reference_in_float64(
    layout: torch.memory_format, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operator takes one step, whatever reads it, and torch's way of joining and moving is not needed."""
    with monkeypatch.context() as patch:
        for name in ("step", "take_over"):
            patch.setattr(ops.reference if name == "step" else ops, name, None)
        patch.setattr(C, "gradients", None)
        got = trained(torch.float32, layout, make=Dense)
    assert launched.count("pool") == launched.count("remember") == launched.count("move_running") == STEPS * 3
    assert launched.count("backward_vectors") == STEPS * 3
    assert_alike(got, trained(torch.float64, torch.contiguous_format, make=Dense), 1e-3)


@pytest.mark.parametrize("spoilt", ["no operator's", "an operator's"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of the interpreter
def test_one_infinite_segment_of_a_concatenation_lets_nothing_be_remembered(
    spoilt: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> dict[str, Tensor]:
        torch.manual_seed(0)
        conv, other, norm = nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(9)
        model = nn.ModuleList([conv, other, norm]).to(DEVICE)
        crossbn.convert_(model, window=3, weights="equal", pairs={})
        for step in range(3):
            images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            plain, read = images.clone(), images.clone()
            (plain if spoilt == "no operator's" else read)[0, 0, 0, 0] = torch.inf if step == 1 else 0.0
            norm(torch.cat([conv(images), F.max_pool2d(plain, 1), other(read)], 1)).sum().backward()
        return {**norm.state_dict(), **crossbn.history_state(model)}

    got = train()
    assert launched.count("pool") == 6
    monkeypatch.delitem(ops.DEVICES, "cpu")
    expected = train()
    assert int(got["num_batches_tracked"]) == 2
    assert_alike(got, expected, 1e-4)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_network_trains_as_with_the_reference_in_a_narrow_type(narrow: torch.dtype, launched: list[str]) -> None:
    got = trained(torch.float32, torch.contiguous_format, narrow)
    assert launched.count("pool") == STEPS * 5
    del ops.DEVICES["cpu"]
    expected = trained(torch.float32, torch.contiguous_format, narrow)
    assert launched.count("pool") == STEPS * 5
    assert_alike(got, expected, 0.05)


def assert_alike(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        absolute = tolerance * max([1e-3, *value.abs().flatten().tolist()])
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=absolute, msg=message)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: x, (60, 20, 1)),
        (lambda x: x.to(memory_format=torch.channels_last), (60, 1, 3)),
        (lambda x: x[:, 1:], (60, 20, 1)),
        (lambda x: x[:, :, :1], (60, 20, 1)),
        (lambda x: x[..., ::5], (60, 20, 5)),
        (lambda x: x[..., ::2], None),
        (lambda x: x[:, :, ::2], None),
        (lambda x: x.flatten(1), (60, 1, 0)),
    ],
)
def test_strides(make: Callable[[Tensor], Tensor], expected: tuple[int, int, int] | None) -> None:
    x = make(torch.arange(2.0 * 60).reshape(2, 3, 4, 5))
    strides = flat_strides(x)
    assert strides == expected
    if strides is not None:
        flat = x.as_strided((2, x.shape[1], x[0, 0].numel()), strides, x.storage_offset())
        assert torch.equal(flat, x.reshape(flat.shape))


def test_explain() -> None:
    norms = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    model = nn.Sequential(*copy.deepcopy(norms))
    crossbn.convert_(model, window=3)
    model(torch.randn(2, 3, 8, 8))
    assert [str(way) for way in ops.explain(model)] == [
        "1: 4 channels on cpu by C",
        "3: 4 channels on cpu by torch, because its operator has a bias",
    ]
    with ops.library.switched_off():
        assert "compiled library is not there" in str(ops.explain(model)[0])
    crossbn.convert_(model, window=1)
    assert [way.reason for way in ops.explain(model)] == ["nothing is pooled: it is BatchNorm"] * 2


def test_explain_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    crossbn.convert_(model, window=3)
    monkeypatch.delitem(ops.DEVICES, "cpu")
    assert ops.explain(model)[0].reason == "there are no kernels for cpu"
    ops._SAID.discard("cpu")
    with pytest.warns(crossbn.ConversionWarning, match="many small ones: there are no kernels for cpu"):
        model(torch.randn(2, 3, 8, 8))
    monkeypatch.setitem(ops.DEVICES, "cpu", triton)
    monkeypatch.setattr(triton, "is_installed", lambda: False)
    assert ops.explain(model)[0].reason == "Triton is not installed: pip install triton"
    ops._SAID.discard("cpu")
    with pytest.warns(crossbn.ConversionWarning, match="Triton is not installed"):
        model(torch.randn(2, 3, 8, 8))
    ops._SAID.discard("cpu")


@pytest.mark.parametrize("name", ["patches", *OPERATORS])
def test_table_has_operators_that_kernels_are_for(name: str) -> None:
    assert name in _USUAL
