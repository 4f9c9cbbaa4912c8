"""The history of a model: copied, moved, averaged around, looked past by evaluation, saved and restored."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import crossbn
from tests.support import assert_same, batch, by_pickle, train

Copier = Callable[[nn.Module], nn.Module]


class Dense(nn.Module):
    """conv1 feeds both norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 2, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.conv1(x)
        second = self.conv2(self.norm1(first).relu())
        joined = self.norm2(torch.cat([first, second], 1))
        out: Tensor = self.head(joined.relu().mean((2, 3)))
        return out


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(45, 3),
        nn.BatchNorm1d(3),
    )


def weight_normed() -> nn.Sequential:
    model = chain()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "dense": Dense, "weight norm": weight_normed}


def converted(name: str = "chain", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    crossbn.convert_(model, **{"window": 3, "positions": 16, **options})
    return model


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, history."""
    state = {f"model {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {f"history {name}": tensor for name, tensor in crossbn.history_state(model).items()}


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    ("name", "copier"),
    [
        *[(name, copy.deepcopy) for name in MODELS],
        # torch does not pickle parametrized modules.
        *[(name, copier) for name in ("chain", "dense") for copier in (by_pickle, by_torch_save)],
    ],
)
@pytest.mark.parametrize("options", [{}, {"burn_in": 3}, {"order": 2}], ids=str)
def test_copy_goes_on_alike_and_alone(copier: Copier, name: str, options: dict[str, Any]) -> None:
    model = converted(name, **options)
    train(model, range(2))
    twin = copier(model)
    before = everything(model)
    assert_same(everything(twin), before)
    of_twin = train(twin, range(2, 6))
    assert_same(everything(model), before)
    of_model = train(model, range(2, 6))
    assert all(map(torch.equal, of_twin, of_model))
    assert_same(everything(twin), everything(model))


def test_copy_between_forward_and_backward_has_no_graph() -> None:
    model = converted("weight norm")
    train(model, range(2))
    out = model(batch(2))
    twin = copy.deepcopy(model)
    out.sum().backward()
    assert torch.equal(model(batch(3)), twin(batch(3)))


def test_double_keeps_values_and_float_gives_them_back() -> None:
    model = converted()
    train(model, range(3))
    before = everything(model)
    model.double()
    history = crossbn.history_state(model)
    assert {tensor.dtype for tensor in history.values()} == {torch.float64, torch.int64}
    assert all(torch.equal(history[name], before[f"history {name}"].to(history[name].dtype)) for name in history)
    assert model(batch(3, torch.float64)).isfinite().all()
    model = converted()
    train(model, range(3))
    assert_same(everything(model.double().float()), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_leaves_history_in_float32(dtype: torch.dtype) -> None:
    model = converted()
    train(model, range(3))
    before = crossbn.history_state(model)
    model.to(dtype)
    assert_same(crossbn.history_state(model), before)
    out = model(batch(3, dtype))
    out.sum().backward()
    assert out.dtype == dtype
    assert out.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_meta(name: str) -> None:
    model = converted(name)
    train(model, range(2))
    model.to("meta")
    numbers = ("burnt", "layout", "of")  # they say what is remembered, and are read by Python
    history = {key: tensor for key, tensor in crossbn.history_state(model).items() if not key.endswith(numbers)}
    assert {tensor.device.type for tensor in history.values()} == {"meta"}
    assert model(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 3)


@pytest.mark.usefixtures("_poisoned_memory")
def test_meta_to_empty_to_loaded() -> None:
    model, whole = chain().to("meta"), converted()
    crossbn.convert_(model, window=3, positions=16)
    model.to_empty(device="cpu")
    model.load_state_dict(whole.state_dict())
    assert all(map(torch.equal, train(model, range(3)), train(whole, range(3))))


def test_averaged_model_averages_no_history() -> None:
    model = converted()
    train(model, range(3))
    averaged = AveragedModel(model, avg_fn=lambda old, new, _: (old + new) / 2)
    averaged.update_parameters(model)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    history = crossbn.history_state(averaged.module)
    train(model, range(3, 6))
    averaged.update_parameters(model)
    assert_same(crossbn.history_state(averaged.module), history)
    assert {name for name, _ in averaged.module.named_buffers()} == {name for name, _ in chain().named_buffers()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(averaged.module.get_parameter(name), (start[name] + parameter) / 2)


def test_update_bn_gives_the_statistics_of_batchnorm() -> None:
    model = converted().double()
    for step in range(3):
        model(batch(step, torch.float64)).sum().backward()
    plain = copy.deepcopy(model)
    crossbn.revert_(plain)
    averaged, plain_averaged = AveragedModel(model), AveragedModel(plain)
    loader = [batch(step, torch.float64) for step in range(10, 15)]
    update_bn(loader, averaged)
    update_bn(loader, plain_averaged)
    for name, buffer in plain_averaged.named_buffers():
        torch.testing.assert_close(averaged.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("burn_in", [0, 3])
def test_evaluation_leaves_no_trace(name: str, burn_in: int) -> None:
    model, undisturbed = converted(name, burn_in=burn_in), converted(name, burn_in=burn_in)
    train(model, range(2))
    train(undisturbed, range(2))
    before = everything(model)
    model.eval()
    model(batch(7))
    with torch.no_grad():
        model(batch(8))
    model.train()
    assert_same(everything(model), before)
    assert all(map(torch.equal, train(model, range(2, 5)), train(undisturbed, range(2, 5))))


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("burn_in", [0, 3])
def test_training_mode_without_gradients_uses_the_window_and_remembers_nothing(
    without_gradients: Callable[[], Any], burn_in: int
) -> None:
    model = converted("dense", burn_in=burn_in)
    train(model, range(2))
    before = crossbn.history_state(model)
    with without_gradients():
        look = model(batch(2)).clone()
    assert_same(crossbn.history_state(model), before)
    assert torch.equal(look, model(batch(2)))
    assert int(model.state_dict()["norm1.num_batches_tracked"]) == 4  # as BatchNorm counts


@pytest.mark.parametrize("track_running_stats", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_evaluation_is_that_of_batchnorm(affine: bool, track_running_stats: bool) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, 1e-3, 0.2, affine, track_running_stats))
    model = copy.deepcopy(plain)
    crossbn.convert_(model, window=3)
    train(model, range(3))
    plain.load_state_dict(model.state_dict())
    x = batch(9).requires_grad_()
    out, expected = model.eval()(x), plain.eval()(x)
    assert torch.equal(out, expected)
    weights = torch.randn_like(out)
    (ours,) = torch.autograd.grad((out * weights).sum(), x)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), x)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_history_state_restores_the_moment(name: str) -> None:
    model = converted(name, burn_in=1)
    train(model, range(3))
    weights, history = copy.deepcopy(model.state_dict()), crossbn.history_state(model)
    straight = train(model, range(3, 6))
    end = everything(model)
    model.load_state_dict(weights)
    crossbn.load_history_state(model, history)
    assert all(map(torch.equal, train(model, range(3, 6)), straight))
    assert_same(everything(model), end)


def test_history_state_is_a_copy() -> None:
    model = converted()
    train(model, range(2))
    state = crossbn.history_state(model)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    train(model, range(2, 4))
    assert_same(state, kept)


def test_shared_history_is_saved_once() -> None:
    state = crossbn.history_state(converted("dense"))
    owners = {key.rpartition("/")[0] for key in state if not key.endswith("/of")}
    assert owners == {"norm1", "norm1/0", "norm2", "norm2/1"}
    assert bytes(state["norm2/0/of"].tolist()) == b"norm1/0"


def without(state: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in state.items() if part not in key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: without(state, "4/0/"), "^4/0: .* do not share .*mean"),
        (lambda state: without(state, "4/0/var_at"), "^4/0: .* do not share var_at"),
        (lambda state: without(state, "8/burnt"), "^8: .*burn-in"),
        (
            lambda state: {**state, "4/0/mean": torch.zeros(2, 7)},
            r"^4/0: mean has the shape \(2, 5\) here and \(2, 7\)",
        ),
        (lambda state: {**state, "body.9/burnt": torch.tensor(0)}, "'body.9/burnt'.* no layer"),
    ],
)
def test_history_that_does_not_fit(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str) -> None:
    model = converted()
    train(model, range(2))
    state = crossbn.history_state(model)
    train(model, range(2, 4))
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        crossbn.load_history_state(model, change(state))
    assert_same(everything(model), before)


def test_history_of_another_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^1/0: the saved history is of window 3, this one of window 4"):
        crossbn.load_history_state(converted(window=4), crossbn.history_state(converted(window=3)))


@pytest.mark.parametrize("burn_in", [0, 1])
def test_reset_forgets_steps_and_burn_in(burn_in: int) -> None:
    model, plain = converted(burn_in=burn_in, weights="equal").double(), chain().double()
    plain.load_state_dict(model.state_dict())
    for step in range(4):
        model(batch(step, torch.float64))
    crossbn.reset_history_(model)
    x = batch(5, torch.float64)
    for _ in range(1 + burn_in):
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-10)
    assert not torch.allclose(model(-x), plain(-x), atol=1e-3)
