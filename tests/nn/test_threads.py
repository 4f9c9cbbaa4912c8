"""One model in several threads, replicas of it, and forwards that fail: every training forward is remembered once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from tests.support import batch, conv_norm, converted, history_is_finite, steps_pushed

ROUNDS = 60


def at_once(*jobs: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """Run the jobs in threads that start together; what one raises is raised here."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], list[Tensor]]) -> list[Tensor]:
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


def training(model: nn.Module, first: int, backward: bool = True) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        outputs = []
        for step in range(first, first + ROUNDS):
            out = model(batch(step))
            if backward:
                torch.autograd.grad(out.sin().sum(), list(model.parameters()))
            outputs.append(out.detach())
        return outputs

    return run


def looking(model: nn.Module) -> Callable[[], list[Tensor]]:
    """Forwards in training mode without gradients: the mode is the thread's own."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [model(batch(step)) for step in range(ROUNDS)]

    return run


@pytest.mark.parametrize("options", [{}, {"order": 2}, {"positions": 8}, {"window": 2}], ids=str)
@pytest.mark.parametrize("backward", [True, False])
def test_two_threads_train(options: dict[str, Any], backward: bool) -> None:
    model = converted(**options)
    outputs = at_once(training(model, 0, backward), training(model, 1000, backward), looking(model))
    assert all(out.isfinite().all() for each in outputs for out in each)
    assert steps_pushed(model) == 2 * ROUNDS
    assert history_is_finite(model)
    # Weights have not changed: each output is normalized with its own batch and others of the same kind.
    for out in outputs[0]:
        assert out.mean((0, 2, 3)).abs().max() < 1
        assert out.std((0, 2, 3)).min() > 0.5
        assert out.std((0, 2, 3)).max() < 2


def test_burn_in_counts_the_forwards_of_all_threads() -> None:
    model = converted(burn_in=ROUNDS)
    at_once(training(model, 0), training(model, 1000), looking(model))
    # The last forward of burn-in and one of the other thread may overlap: then both are BatchNorm's.
    assert steps_pushed(model) in (ROUNDS - 1, ROUNDS)


def test_looks_in_another_thread_are_not_remembered() -> None:
    model, alone = converted(), converted()
    results = at_once(training(model, 0), looking(model), looking(model))
    assert all(out.isfinite().all() for each in results for out in each)
    assert steps_pushed(model) == ROUNDS
    expected = training(alone, 0)()
    torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-5)


def test_evaluation_of_a_copy_with_shared_parameters_at_the_same_time() -> None:
    """Training mode belongs to a module, so evaluation at the same time is that of another one."""
    model, evaluated = converted(), converted().eval()
    for name, parameter in model.named_parameters():
        setattr(evaluated.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], parameter)
    results = at_once(training(model, 0), training(evaluated, 0, backward=False))
    assert all(out.isfinite().all() for each in results for out in each)
    assert (steps_pushed(model), steps_pushed(evaluated)) == (ROUNDS, 0)


def replicated(model: nn.Sequential, device: str = "cpu") -> nn.Sequential:
    """What `torch.nn.parallel.replicate` does for one more device: parameters are no leaves."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copy in copies.items():
        for name, child in module.named_children():
            copy._modules[name] = copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                copy._parameters[name] = None
            else:
                setattr(copy, name, parameter.to(device, copy=True))
        for name, buffer in module.named_buffers(recurse=False):
            copy._buffers[name] = buffer.to(device, copy=True)
    replica = copies[model]
    assert isinstance(replica, nn.Sequential)
    return replica


def test_replica_leaves_the_original_consistent() -> None:
    model = converted()
    for step in range(3):
        before = steps_pushed(model)
        replica = replicated(model)
        out = replica(batch(step))
        assert out.isfinite().all()
        assert out[:1].std() > 0.5
        grads = torch.autograd.grad(out.sin().sum(), list(model.parameters()))
        assert all(grad.isfinite().all() for grad in grads)
        assert steps_pushed(model) - before in (0, 1)
        assert history_is_finite(model)
    before = steps_pushed(model)
    assert model(batch(3)).isfinite().all()
    assert steps_pushed(model) == before + 1


def test_replica_on_another_device_has_a_history_of_its_own() -> None:
    model, undisturbed = converted(), converted()
    for step in range(3):
        assert replicated(model, "meta")(batch(step).to("meta")).device.type == "meta"
        assert torch.equal(model(batch(step)), undisturbed(batch(step)))
    ours, theirs = crossbn.history_state(model), crossbn.history_state(undisturbed)
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def test_replica_alone_is_right() -> None:
    """The first forward of a replica has nothing to remember: BatchNorm."""
    model, plain = converted(), conv_norm()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(replicated(model)(batch(0)), plain(batch(0)), rtol=1e-5, atol=1e-5)


def test_replicas_in_threads() -> None:
    model = converted()
    replicas = [replicated(model) for _ in range(3)]
    outputs = at_once(*(training_once(replica, i) for i, replica in enumerate([model, *replicas])))
    assert all(out.isfinite().all() for each in outputs for out in each)
    assert 1 <= steps_pushed(model) <= 4
    assert history_is_finite(model)


def training_once(model: nn.Module, step: int) -> Callable[[], list[Tensor]]:
    return lambda: [model(batch(step)).detach()]


class FailsOnce(nn.Module):
    """As if memory ran out."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def forward(self, x: Tensor) -> Tensor:
        self.failures -= 1
        if self.failures >= 0:
            raise MemoryError("no room")
        return x


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("options", [{}, {"order": 2}, {"burn_in": 2}], ids=str)
def test_failed_forward_that_is_tried_again_is_remembered_once(failures: int, options: dict[str, Any]) -> None:
    failing = FailsOnce(0)
    model, undisturbed = converted(failing, **options), converted(FailsOnce(0), **options)
    for step in range(5):
        failing.failures = failures if step in (1, 3) else 0
        while failing.failures > 0:
            with pytest.raises(MemoryError):
                model(batch(step))
        out, expected = model(batch(step)), undisturbed(batch(step))
        assert torch.equal(out, expected)
        out.sum().backward()
    assert steps_pushed(model) == steps_pushed(undisturbed) == 5 - options.get("burn_in", 0)
    ours, theirs = crossbn.history_state(model), crossbn.history_state(undisturbed)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
