"""A history in bfloat16: half the memory, and no drift where there is none."""

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn import functional as C

PLANS = [C.Plan("gradient", 20), C.Plan("gradient", None), C.Plan("patches", 20)]


@pytest.fixture(params=PLANS, ids=str)
def _plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossbn.functional.storage.choose_plan", lambda *_: request.param)


def make(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    model += nn.Sequential(nn.Conv2d(6, 4, 3, groups=2, bias=False), nn.BatchNorm2d(4))
    crossbn.convert_(model, window=3, history_dtype=torch.bfloat16, **options)  # type: ignore[arg-type]
    return model


def bulk_bytes(model: nn.Module) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for tensor in crossbn.history_state(model).values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return sizes


@pytest.mark.usefixtures("_plan")
def test_unchanged_weights_are_pooled_exactly() -> None:
    model = make(weights="equal").double()
    plain = nn.BatchNorm2d(6).double()
    batches = torch.randn(4, 2, 3, 7, 7, dtype=torch.float64)
    outputs = [model[1](model[0](x)) for x in batches]
    together = plain(torch.cat([model[0](x) for x in batches[1:]]))
    torch.testing.assert_close(outputs[-1], together[-2:], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_plan")
def test_rounding_is_all_that_changes() -> None:
    def outputs(model: nn.Module) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        seen = []
        for _ in range(5):
            x = torch.randn(2, 3, 7, 7, generator=generator, dtype=torch.float64)
            seen.append(model(x))
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64), alpha=0.02)
        return seen

    rounded, model = make().double(), make().double()
    crossbn.convert_(model, window=3)
    for ours, exact in zip(outputs(rounded), outputs(model), strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=0.01)
    assert not torch.equal(ours, exact)


def test_it_is_half_as_large_and_stays_so() -> None:
    model = make()
    sizes = bulk_bytes(model)
    state = crossbn.history_state(model)
    large = [name for name in state if name.endswith("grad")]
    assert {state[name].dtype for name in large} == {torch.bfloat16}
    assert sizes[torch.bfloat16] == sum(state[name].numel() * 2 for name in large)
    model.double()
    assert bulk_bytes(model)[torch.bfloat16] == sizes[torch.bfloat16]
    model.float()(torch.randn(2, 3, 7, 7))
    twin = make()
    crossbn.load_history_state(twin, crossbn.history_state(model))
    for name, tensor in crossbn.history_state(twin).items():
        assert torch.equal(tensor, crossbn.history_state(model)[name]), name


def test_converting_again_changes_it() -> None:
    model = make()
    crossbn.convert_(model, window=3)
    assert torch.bfloat16 not in bulk_bytes(model)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"history_dtype must be one of None, torch.bfloat16, got torch.int8"):
        crossbn.convert_(nn.Sequential(nn.BatchNorm1d(2)), window=2, history_dtype=torch.int8)
