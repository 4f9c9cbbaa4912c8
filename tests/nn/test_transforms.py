"""What is done to a model in the middle of training: casts, functional calls, export, meta devices, copies."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import crossbn
from tests.support import assert_same, batch, by_pickle, conv_norm, converted, steps_pushed, train

CASTS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "type": (lambda model: model.type(torch.float32), torch.float32),
    "type double": (lambda model: model.type(torch.float64), torch.float64),
    "type half": (lambda model: model.type(torch.bfloat16), torch.bfloat16),
    "float": (lambda model: model.float(), torch.float32),
    "double": (lambda model: model.double(), torch.float64),
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("order", [1, 2])
def test_cast_in_the_middle_of_training(cast: str, order: int) -> None:
    apply, dtype = CASTS[cast]
    model, untouched = converted(order=order), converted(order=order)
    train(model, range(5))
    train(untouched, range(5))
    apply(model)
    outputs, expected = train(model, range(5, 12), dtype), train(untouched, range(5, 12))
    counter = crossbn.history_state(model)["norm/0/pushed"]
    assert counter.dtype == torch.int64
    assert int(counter) == 12
    tolerance = 1e-4 if dtype.itemsize >= 4 else 0.1
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


def functional_steps(model: nn.Module, steps: range) -> list[Tensor]:
    """The steps of `train` with parameters of their own, new tensors at each step."""
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    outputs = []
    for step in steps:
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        out = functional_call(model, leaves, (batch(step),))
        grads = torch.autograd.grad(out.sin().sum(), list(leaves.values()))
        values = {n: (v - 0.01 * g).detach() for (n, v), g in zip(leaves.items(), grads, strict=True)}
        outputs.append(out.detach())
    return outputs


@pytest.mark.parametrize("order", [1, 2])
def test_functional_call_keeps_the_history(order: int) -> None:
    options: dict[str, Any] = {"order": order, "weights": "equal"}
    model, in_place = converted(**options), converted(**options)
    got, expected = functional_steps(model, range(6)), train(in_place, range(6))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got[1], train(conv_norm(), range(2))[1], atol=1e-3)
    assert steps_pushed(model) == 6


def test_functional_call_that_computes_the_weights() -> None:
    """A fast weight of meta-learning is no leaf, and gets its gradient."""
    model, in_place = converted().double(), converted().double()
    x, y = batch(0).double(), batch(1).double()
    model(x).sum().backward()
    in_place(x).sum().backward()
    slow = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    names = dict(model.named_parameters())
    out = functional_call(model, {**names, "conv.weight": names["conv.weight"].detach() * slow}, (y,))
    with torch.no_grad():
        in_place.get_parameter("conv.weight").mul_(0.9)
    expected = in_place(y)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = in_place.get_parameter("conv.weight")
    (of_slow,) = torch.autograd.grad(out.sin().sum(), slow)
    (of_weight,) = torch.autograd.grad(expected.sin().sum(), weight)
    torch.testing.assert_close(of_slow, (of_weight * weight.detach() / 0.9).sum(), rtol=1e-8, atol=1e-8)


def test_func_grad_leaves_no_trace() -> None:
    model, undisturbed = converted(), converted()
    train(model, range(3))
    train(undisturbed, range(3))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(model, {**parameters, **buffers}, (batch(7),))
        return out.sin().sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grads = torch.func.grad(loss)(parameters, buffers)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert grads["conv.weight"].abs().max() > 0
    assert len(caught) <= 1
    assert all(issubclass(each.category, UserWarning) for each in caught)
    assert_same(train(model, range(3, 7)), train(undisturbed, range(3, 7)))


@pytest.mark.parametrize("burn_in", [0, 5])
def test_export_in_training_mode_leaves_the_model_trainable(burn_in: int) -> None:
    torch.export.export(conv_norm(), (batch(9),))  # what torch can do
    model, undisturbed = converted(burn_in=burn_in), converted(burn_in=burn_in)
    train(model, range(3))
    train(undisturbed, range(3))
    torch.export.export(model, (batch(9),))
    assert all(isinstance(buffer, Tensor) and buffer.isfinite().all() for buffer in model.buffers())
    assert_same(train(model, range(3, 7)), train(undisturbed, range(3, 7)))
    assert_same(list(model.state_dict().values()), list(undisturbed.state_dict().values()))


def test_export_before_the_first_step() -> None:
    model, undisturbed = converted(), converted()
    torch.export.export(model, (batch(9),))
    assert_same(train(model, range(5)), train(undisturbed, range(5)))


def by_to_empty(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def by_assignment(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.load_state_dict(copy.deepcopy(state), assign=True)
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu", name


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("materialize", [by_to_empty, by_assignment])
@pytest.mark.parametrize("options", [{}, {"burn_in": 2}, {"order": 2}, {"order": 2, "burn_in": 2}], ids=str)
def test_meta_initialization(materialize: Callable[..., None], options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = conv_norm()
    crossbn.convert_(model, window=4, **options)
    whole = converted(**options)
    materialize(model, whole.state_dict())
    assert_same(train(model, range(7)), train(whole, range(7)))
    assert_same(list(model.state_dict().values()), list(whole.state_dict().values()))
    ours, theirs = crossbn.history_state(model), crossbn.history_state(whole)
    assert {tensor.device.type for tensor in ours.values()} == {"cpu"}
    assert ours.keys() == theirs.keys()
    assert_same(list(ours.values()), list(theirs.values()))


@pytest.mark.parametrize("copier", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_copy_goes_on_alike_and_alone(copier: Callable[[nn.Module], nn.Module], steps: int) -> None:
    model = converted(burn_in=1)
    train(model, range(steps))
    twin = copier(model)
    before = crossbn.history_state(model)
    outputs = train(twin, range(steps, steps + 5))
    assert_same(list(crossbn.history_state(model).values()), list(before.values()))
    assert_same(train(model, range(steps, steps + 5)), outputs)


def test_batched_gradients_are_those_one_by_one() -> None:
    model = converted(positions=None).double()
    train(model, range(3), torch.float64)
    x = batch(3, torch.float64).requires_grad_()
    out, values = model(x), [x, *model.parameters()]
    vectors = torch.randn(3, *out.shape, dtype=torch.float64)
    rows = [torch.autograd.grad(out, values, vector, retain_graph=True) for vector in vectors]
    try:
        got = torch.autograd.grad(out, values, vectors, is_grads_batched=True, retain_graph=True)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("is_grads_batched", "batched", "vmap")):
            raise
    else:
        expected = [torch.stack(column) for column in zip(*rows, strict=True)]
        torch.testing.assert_close(list(got), expected, rtol=1e-9, atol=1e-9)
