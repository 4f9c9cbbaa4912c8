"""One battery that every registered norm passes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from crossbn.nn import NORMS, RenormSchedule, make_norm
from tests.nn.norms.reference import EPS, GROUPS, REFERENCES, STEPS

CHANNELS = 6
OWN: dict[str, dict[str, Any]] = {
    "gn": {"groups": GROUPS},
    "brn": {"schedule": RenormSchedule().scaled(0.01)},
    "ssn": {"steps": STEPS},
}
SHAPES: dict[int, tuple[int, ...]] = {1: (3, CHANNELS, 7), 2: (3, CHANNELS, 4, 3), 3: (2, CHANNELS, 2, 3, 2)}
SPATIAL = {"in", "bin"}
"""Norms of instances: an input [N, C] has no statistics of their kind."""
NO_RUNNING = {"in", "ln", "gn"}
NEEDS_RUNNING = {"brn", "ssn", "frozen_bn"}


def all_but(*groups: set[str]) -> list[str]:
    return [name for name in NORMS if not any(name in group for group in groups)]


def build(name: str, dims: int | None = 2, **options: Any) -> nn.Module:
    """A norm in float64 whose parameters and buffers are unlike the initial ones."""
    norm = make_norm(name, CHANNELS, dims, eps=EPS, **OWN.get(name, {}), **options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
            if tensor.is_floating_point():
                low, high = (0.2, 0.6) if key in ("gate", "mean_logits", "var_logits") else (0.5, 1.5)
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) * (high - low) + low)
            else:
                tensor.fill_(400)
    return norm


def batch(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * 2 + 1


def state_of(norm: nn.Module) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in norm.state_dict().items()}


def expected(name: str, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input and gradients of the parameters of the slow reference."""
    state = state_of(norm)
    own = {key: state[key].requires_grad_() for key, _ in norm.named_parameters()}
    x = x.detach().clone().requires_grad_()
    y = REFERENCES[name](x, state, norm.training)
    grads = torch.autograd.grad(objective(y), [x, *own.values()], allow_unused=True, materialize_grads=True)
    return y.detach(), grads[0], dict(zip(own, grads[1:], strict=True))


def objective(y: Tensor) -> Tensor:
    return (y.sin() * torch.linspace(0.5, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


def assert_as_reference(name: str, norm: nn.Module, x: Tensor) -> None:
    y, grad, grads = expected(name, norm, x)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = norm(x)
    objective(out).backward()
    torch.testing.assert_close(out, y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(x.grad, grad, rtol=1e-8, atol=1e-8)
    for key, parameter in norm.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[key], rtol=1e-8, atol=1e-8, msg=f"gradient of {key}")


def test_every_norm_has_a_reference() -> None:
    assert NORMS.keys() == REFERENCES.keys()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dims", [1, 2, 3, None])
@pytest.mark.parametrize("name", NORMS)
def test_reference(name: str, dims: int | None, training: bool) -> None:
    assert_as_reference(name, build(name, dims).train(training), batch(*SHAPES[dims or 2]))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", all_but(SPATIAL))
def test_no_space(name: str, training: bool) -> None:
    assert_as_reference(name, build(name, 1).train(training), batch(5, CHANNELS))


@pytest.mark.parametrize("name", NORMS)
def test_batch_of_one(name: str) -> None:
    assert_as_reference(name, build(name), batch(1, CHANNELS, 4, 3))


@pytest.mark.parametrize("name", NORMS)
def test_without_affine(name: str) -> None:
    norm = build(name, affine=False)
    assert not {"weight", "bias"} & {key for key, _ in norm.named_parameters()}
    assert_as_reference(name, norm, batch(*SHAPES[2]))


@pytest.mark.parametrize("name", all_but(NEEDS_RUNNING, NO_RUNNING))
def test_without_running_statistics(name: str) -> None:
    """Evaluation normalizes with the batch, as torch's BatchNorm does."""
    norm = build(name, track_running_stats=False)
    x = batch(*SHAPES[2])
    assert not {"running_mean", "running_var"} & norm.state_dict().keys()
    torch.testing.assert_close(norm.eval()(x), norm.train()(x))


@pytest.mark.parametrize("name", sorted(NEEDS_RUNNING))
def test_running_statistics_are_needed(name: str) -> None:
    with pytest.raises(ValueError, match="got track_running_stats=False"):
        make_norm(name, CHANNELS, track_running_stats=False)


@pytest.mark.parametrize("name", all_but({"brn", "cbn", "naive_cbn"}))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradcheck(name: str, training: bool) -> None:
    """Not of brn, whose r and d are constants to the gradient, nor of norms that remember the calls before."""
    norm = build(name).train(training)
    state = state_of(norm)
    keys = [key for key, _ in norm.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        fresh = {key: value.clone() for key, value in state.items()}
        y: Tensor = functional_call(norm, {**fresh, **dict(zip(keys, parameters, strict=True))}, (x,))
        return y

    inputs = [batch(2, CHANNELS, 2, 2).requires_grad_(), *(state[key].requires_grad_() for key in keys)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("name", all_but(NO_RUNNING, {"frozen_bn"}))
def test_running_statistics(name: str, momentum: float | None) -> None:
    norm, plain = build(name, momentum=momentum), build("bn", momentum=momentum)
    plain.load_state_dict(norm.state_dict(), strict=False)
    x = batch(*SHAPES[2])
    step = 1 / 401 if momentum is None else momentum
    std = torch.sqrt(x.var((0, 2, 3), correction=0) + EPS)
    moved_std = torch.lerp(torch.sqrt(norm.get_buffer("running_var") + EPS), std, step)
    norm(x)
    plain(x)
    wanted = state_of(plain)
    if name == "brn":  # the average of standard deviations, without correction
        wanted["running_var"] = moved_std.square() - EPS
    for key, buffer in norm.named_buffers():
        torch.testing.assert_close(buffer, wanted[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NORMS)
def test_state_dict_round_trip(name: str) -> None:
    norm, fresh = build(name), make_norm(name, CHANNELS, eps=EPS, **OWN.get(name, {})).double()
    for _ in range(2):
        norm(batch(*SHAPES[2]))
    fresh.load_state_dict(norm.state_dict())
    x = batch(*SHAPES[2])
    assert torch.equal(fresh.eval()(x), norm.eval()(x))


@pytest.mark.parametrize("name", all_but(NO_RUNNING))
def test_batchnorm_checkpoint(name: str) -> None:
    """It has the keys, and lacks at most the norm's own parameters."""
    norm, plain = build(name), build("bn")
    missing, unexpected = norm.load_state_dict(plain.state_dict(), strict=False)
    assert unexpected == []
    assert {*missing} <= {"gate", "mean_logits", "var_logits"}
    assert torch.equal(norm.state_dict()["running_mean"], plain.state_dict()["running_mean"])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
@pytest.mark.parametrize("name", NORMS)
def test_copies_go_on_alike_and_alone(name: str, copier: Any) -> None:
    norm = build(name)
    norm(batch(*SHAPES[2]).requires_grad_()).sum().backward()
    twin = copier(norm)
    before, x = state_of(norm), batch(*SHAPES[2])
    out = twin(x)
    for key, value in before.items():
        assert torch.equal(norm.state_dict()[key], value)
    assert torch.equal(norm(x), out)


@pytest.mark.parametrize("name", NORMS)
def test_bfloat16_autocast(name: str) -> None:
    """No more than the rounding of the input and of the output."""
    x = batch(*SHAPES[2]).bfloat16()
    y, grad, _ = expected(name, build(name), x.double())
    x.requires_grad_()
    norm = build(name).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    objective(out.double()).backward()
    torch.testing.assert_close(out.double(), y, rtol=2e-2, atol=2e-2)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), grad, rtol=5e-2, atol=5e-2)
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in norm.parameters())


@pytest.mark.parametrize("name", NORMS)
def test_bfloat16_parameters(name: str) -> None:
    norm = build(name).bfloat16()
    x = batch(*SHAPES[2]).bfloat16()
    y, _, _ = expected(name, copy.deepcopy(norm).double(), x.double())
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), y, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("name", NORMS)
def test_channels_last(name: str) -> None:
    x = batch(*SHAPES[2]).contiguous(memory_format=torch.channels_last)
    assert_as_reference(name, build(name), x)
    if name != "in":  # torch's own loses the layout
        assert build(name)(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", NORMS)
def test_training_mode_without_gradients(name: str) -> None:
    norm = build(name)
    x = batch(*SHAPES[2])
    y, _, _ = expected(name, norm, x)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", all_but({"ln", "gn"}))  # torch's, for any rank
@pytest.mark.parametrize(
    ("dims", "shape"),
    [(1, (2, CHANNELS, 3, 3)), (2, (2, CHANNELS, 3)), (3, (2, CHANNELS, 3, 3)), (None, (CHANNELS,)), (2, (2, 5, 3, 3))],
)
def test_input_of_another_shape(name: str, dims: int | None, shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"(expected|should contain)"):
        build(name, dims)(batch(*shape))


@pytest.mark.parametrize("name", sorted(SPATIAL))
def test_instances_without_space_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"InstanceNorm: expected an input of 3 dimensions, got \(6, 6\)"):
        build(name, 1)(batch(6, CHANNELS))


@pytest.mark.parametrize("name", ["bn", "sync_bn", "brn", "kn"])
def test_lone_value_per_channel_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="xpected more than 1 value per channel when training"):
        build(name)(batch(1, CHANNELS, 1, 1))
