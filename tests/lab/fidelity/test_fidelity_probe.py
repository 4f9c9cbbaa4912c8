"""The probe in a training that does not notice it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.lab.fidelity import SAME_LAYER, WHOLE_NETWORK
from crossbn.lab.fidelity.probe import FidelityProbe
from tests.lab.fidelity.networks import batch, network, train, trainer


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(), **crossbn.history_state(model), "random": torch.get_rng_state()}


def noisy() -> nn.Module:
    """Has what a forward changes: dropout, a norm that is left alone, a weight that is iterated on."""
    model = network(window=3)
    model[3] = nn.utils.parametrizations.spectral_norm(model[3])
    model.insert(2, nn.Dropout(0.3))
    model.insert(3, nn.BatchNorm2d(5))
    crossbn.convert_(model, window=3, filter_fn=lambda _, name: name != "3")
    return model


@pytest.mark.parametrize("build", [lambda: network(window=3), lambda: network(window=4, burn_in=3), noisy])
@pytest.mark.parametrize("every", [1, 4])
def test_the_training_is_bit_for_bit_the_same(build: Callable[[], nn.Module], every: int) -> None:
    results = []
    for watched in (False, True):
        model = build()
        torch.manual_seed(1)
        probe = FidelityProbe(model, every=every)
        if watched:
            probe.attach()
        losses = train(model, [batch(step) for step in range(10)])
        results.append({**everything(model), "losses": torch.stack(losses)})
        assert bool(probe.records) == watched
        assert {r.truth for r in probe.records} == ({SAME_LAYER, WHOLE_NETWORK} if watched else set())
    plain, measured = results
    assert plain.keys() == measured.keys()
    assert all(torch.equal(plain[name], measured[name]) for name in plain)


def test_gradients_are_the_same_under_autocast() -> None:
    """What autocast casts without gradients must not be used with them."""
    gradients = []
    for watched in (False, True):
        model = network(window=3)
        probe = FidelityProbe(model, every=1)
        if watched:
            probe.attach()
        for step in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step)).square().mean()
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert probe.records
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nothing_is_kept_or_hooked_between_measurements() -> None:
    model = network(window=3)
    probe, train_step, held = FidelityProbe(model, every=6), trainer(model), []
    hooks = len(model[0]._forward_hooks)
    for step in range(8):
        probe.step(batch(step))
        train_step(batch(step))
        inputs = sum(len(kept.inputs) for kept in probe._kept)
        held.append((len(probe._kept), inputs, len(model[0]._forward_hooks) - hooks))
    nothing = (0, 0, 0)
    assert held == [nothing, nothing, (1, 0, 0), (2, 0, 0), (3, 2, 1), (4, 4, 1), nothing, nothing]
    assert {record.step for record in probe.records} == {6}


def test_attached_it_sees_training_forwards_only() -> None:
    model = network(window=3)
    hooks = dict(model._forward_pre_hooks)
    with FidelityProbe(model, every=100) as probe:
        assert len(model._forward_pre_hooks) == len(hooks) + 1
        train(model, [batch(0), batch(1)])
        with torch.no_grad():
            model(batch(2))
        model.eval()
        model(batch(3))
        model.train()
        train(model, [batch(4)])
    assert probe.steps == 3
    train(model, [batch(5)])
    assert probe.steps == 3
    assert dict(model._forward_pre_hooks) == hooks


def test_layers_can_be_chosen() -> None:
    model = network(window=2)
    with FidelityProbe(model, every=2, layers=["4"]) as probe:
        train(model, [batch(step) for step in range(3)])
    assert {record.layer for record in probe.records} == {"4"}


def test_a_batch_that_is_not_finite_is_not_looked_back_on() -> None:
    model = network(window=4)
    probe, batches = FidelityProbe(model, every=5), [batch(step) for step in range(6)]
    batches[3][0, 0, 0, 0] = torch.inf
    for x in batches[:5]:
        probe.step(x)
        model(x)
    found = probe.step(batches[5])
    assert {r.age for r in found if r.truth == SAME_LAYER} == {1, 2}  # inputs are kept of the last three steps
    assert {r.age for r in found if r.truth == WHOLE_NETWORK} == {1, 2, 3}
    assert all(r.fidelity.naive_var_error < 1e-5 for r in found)  # each is compared with its own batch
    assert probe.left_out == {}


def test_batches_of_different_shapes_leave_the_same_layer() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    crossbn.convert_(model, window=3)
    with FidelityProbe(model, every=3) as probe:
        for size in (8, 9, 10, 11):
            model(torch.randn(2, 2, size, size))
    assert {(r.age, r.truth) for r in probe.records} == {(1, SAME_LAYER), (2, SAME_LAYER)}
    assert probe.left_out["1, whole network"].startswith("batches of different shapes cannot be joined")


def test_batches_of_different_sizes_are_told_apart() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    crossbn.convert_(model, window=3)
    with FidelityProbe(model, every=3) as probe:
        for size in (2, 3, 4, 1):
            model(torch.randn(size, 2, 8, 8))
    assert [r.truth for r in probe.records] == 2 * [SAME_LAYER] + 2 * [WHOLE_NETWORK]
    assert all(r.fidelity.naive_var_error < 1e-5 for r in probe.records)


def test_complaints_name_the_layer() -> None:
    with pytest.raises(ValueError, match="no cross-iteration norm to look at"):
        FidelityProbe(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no cross-iteration norm '2', it has 1, 4"):
        FidelityProbe(network(window=2), layers=["2"])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        FidelityProbe(network(window=2), every=0)
