"""What the probe finds, against brute force."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.lab.fidelity import SAME_LAYER, WHOLE_NETWORK, FidelityRecord
from crossbn.lab.fidelity.probe import FidelityProbe, fidelity
from crossbn.lab.fidelity.runs import find_runs
from crossbn.nn import CrossIterBatchNorm
from tests.lab.fidelity.networks import BATCH, batch, network, train, trainer
from tests.pairing.networks import PreActivationNet

LAYERS = {"1": 0, "4": 3}  # norm and its convolution


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)


def look(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """Inputs of all layers, by name."""
    inputs = {}
    for name, layer in model.named_children():
        inputs[name] = x.detach().clone()
        x = layer(x)
    return inputs


@pytest.mark.parametrize("order", [0, 1, 2])
def test_errors_are_those_of_brute_force(order: int) -> None:
    model = network(window=3, order=order)
    copied = copy.deepcopy(model)
    probe = FidelityProbe(model, every=4)
    train_step, seen, found = trainer(model), [], []
    for step in range(5):
        found = probe.step(batch(step))
        assert bool(found) == (step == 4)
        if step < 4:
            copied.load_state_dict(model.state_dict())
            crossbn.load_history_state(copied, crossbn.history_state(model))
            seen.append(look(copied, batch(step)))
            train_step(batch(step))
    plain = copy.deepcopy(model)
    crossbn.revert_(plain)
    # Two norms: what the second reads depends on what the first has pooled, the window of that step.
    windows = {s: torch.cat([batch(i) for i in range(max(0, s - 2), s + 1)]) for s in range(4)}
    again = {s: {n: x[-BATCH:] for n, x in look(plain, together).items()} for s, together in windows.items()}
    keys = [(r.step, r.layer, r.age, r.truth) for r in found]
    assert keys == [(4, n, age, truth) for n in LAYERS for truth in (SAME_LAYER, WHOLE_NETWORK) for age in (1, 2)]
    for record in found:
        norm, conv, old = model[int(record.layer)], model[LAYERS[record.layer]], seen[4 - record.age]
        assert isinstance(norm, CrossIterBatchNorm)
        assert isinstance(conv, nn.Conv2d)
        past = norm.segments[0].past()
        bias = torch.zeros(()) if conv.bias is None or order == 0 else conv.bias.detach()
        with torch.no_grad():
            if record.truth == SAME_LAYER:
                everything = [conv(seen[i][str(LAYERS[record.layer])]) for i in (2, 3)]
            else:
                everything = [again[s][record.layer] for s in range(4)]
        true_mean, true_var = moments(everything[-record.age])
        scale = moments(torch.cat(everything))[1] + 1e-5
        naive_mean, naive_var = moments(old[record.layer])
        if order:
            assert torch.allclose(past.var[record.age - 1], naive_var, rtol=1e-4)
            naive_mean = past.mean[record.age - 1]
        errors = record.fidelity
        compensated = past.compensated_mean[record.age - 1], past.compensated_var[record.age - 1].clamp(min=0)
        for value, mean, var in (("naive", naive_mean, naive_var), ("compensated", *compensated)):
            mean_error = ((mean + bias - true_mean).abs() / scale.sqrt()).mean()
            assert getattr(errors, f"{value}_mean_error") == pytest.approx(float(mean_error), rel=1e-3, abs=1e-6)
            var_error = ((var - true_var).abs() / scale).mean()
            assert getattr(errors, f"{value}_var_error") == pytest.approx(float(var_error), rel=1e-3, abs=1e-6)
        variances = torch.stack([moments(each)[1] for each in everything])
        factor = (len(everything) / (len(everything) - 1)) ** 0.5
        noise = ((variances - variances.mean(0)).abs().mean(0) / scale).mean() * factor
        assert errors.batch_noise == pytest.approx(float(noise), rel=1e-4)
        assert errors.channels == norm.num_features
        assert errors.invalid == float((past.compensated_var[record.age - 1] < 0).float().mean())


def records_of(model: nn.Module, steps: int, lr: float, every: int = 4) -> list[FidelityRecord]:
    return fidelity(model, [batch(step) for step in range(steps)], trainer(model, lr), every=every)


STEP_WEIGHTS: list[dict[str, Any]] = [{"weights": "equal"}, {"weights": "auto"}, {"weights": "equal", "decay": 0.5}]


@pytest.mark.parametrize("weights", STEP_WEIGHTS)
def test_frozen_weights_have_no_error(weights: dict[str, Any]) -> None:
    """The second norm's input depends on how the first one weighed the steps: exactly that is done again."""
    records = records_of(network(window=3, **weights), 9, lr=0.0)
    assert len(records) == 2 * 2 * 2 * 2
    assert all(max(errors_of(r)) < 1e-5 for r in records)
    assert all((r.fidelity.explained_mean, r.fidelity.explained_var) == (0.0, 0.0) for r in records)
    assert all(r.fidelity.batch_noise is not None and r.fidelity.batch_noise > 0.01 for r in records)


@pytest.mark.parametrize("weights", STEP_WEIGHTS)
def test_deep_networks_go_back_further_than_what_is_kept(weights: dict[str, Any]) -> None:
    """What a norm pooled depends on what those before it pooled at each of these steps, and so on back."""
    layers = [(nn.Conv2d(4 if i else 2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for i in range(6)]
    model = nn.Sequential(*(module for layer in layers for module in layer), nn.Flatten(), nn.Linear(256, 3))
    crossbn.convert_(model, window=3, **weights)
    records = records_of(model, 25, lr=0.0, every=12)
    assert {r.layer for r in records} == {str(1 + 3 * i) for i in range(6)}
    assert max(max(errors_of(r)) for r in records) < 1e-4


def test_batches_of_other_sizes_weigh_as_much_as_they_did() -> None:
    model = network(window=3, weights="auto")
    batches = [batch(step)[: 1 + step % 3] for step in range(9)]
    records = fidelity(model, batches, trainer(model, 0.0), every=4)
    assert max(max(errors_of(r)) for r in records) < 1e-5


@pytest.mark.parametrize("weights", STEP_WEIGHTS)
def test_burn_in_is_taken_into_account(weights: dict[str, Any]) -> None:
    """Frozen again: at the first steps after burn-in, norms pooled less than the window."""
    records = records_of(network(window=4, burn_in=2, **weights), 6, lr=0.0, every=1)
    assert {(r.step, r.age) for r in records} == {(3, 1), (4, 1), (4, 2), (5, 1), (5, 2), (5, 3)}
    assert all(max(errors_of(r)) < 1e-5 for r in records)


def errors_of(record: FidelityRecord) -> tuple[float, ...]:
    found = record.fidelity
    return (
        found.naive_mean_error,
        found.compensated_mean_error,
        found.naive_var_error,
        found.compensated_var_error,
    )


def test_second_order_on_all_positions_is_the_same_layer_truth() -> None:
    records = records_of(network(window=4, order=2, positions=None), 9, lr=0.1)
    same = [r.fidelity for r in records if r.truth == SAME_LAYER]
    assert len(same) == 2 * 2 * 3
    assert all(max(f.compensated_mean_error, f.compensated_var_error) < 1e-5 for f in same)
    assert all(min(f.naive_mean_error, f.naive_var_error) > 1e-3 for f in same)
    assert all(f.explained_var > 0.99 for f in same)


def test_of_one_layer_both_truths_are_the_same() -> None:
    """Up to the scale, the variance of a window with or without today's batch, which one channel has one of."""
    model = nn.Sequential(nn.Conv2d(2, 1, 3), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 2))
    crossbn.convert_(model, window=4)
    records = records_of(model, 9, lr=0.1)
    same, network = ([r for r in records if r.truth == truth] for truth in (SAME_LAYER, WHOLE_NETWORK))
    assert len(same) == 6
    for a, b in zip(same, network, strict=True):
        assert (a.step, a.age) == (b.step, b.age)
        assert a.fidelity.naive_var_error > 1e-3
        assert a.fidelity.explained_var == pytest.approx(b.fidelity.explained_var, rel=1e-3)
        assert a.fidelity.explained_mean == pytest.approx(b.fidelity.explained_mean, rel=1e-3)


def test_sums_and_shared_inputs_are_measured_through_the_network() -> None:
    model = nn.Sequential(PreActivationNet(), nn.Flatten(), nn.Linear(512, 2))
    crossbn.convert_(model, window=3)
    probe = FidelityProbe(model, every=4)
    generator = torch.Generator().manual_seed(0)
    with probe:
        train(model, torch.rand(5, 4, 3, 8, 8, generator=generator) - 0.5, lr=0.01)
    runs = {run.layer for run in find_runs(model)}
    assert {r.layer for r in probe.records if r.truth == WHOLE_NETWORK} == runs
    direct = {r.layer for r in probe.records if r.truth == SAME_LAYER}
    assert "0.blocks.1.norm2" in direct
    assert "0.norm" not in direct
    assert probe.left_out["0.norm, same layer"] == "it is fed by a sum, or by an operator without a module"


@pytest.mark.parametrize("unpaired", ["pool", "bn"])
def test_concatenations_are_measured_slice_by_slice_and_once(unpaired: str) -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 3, 1)
            self.second = nn.Conv2d(3, 4, 1)
            self.norm1, self.norm2 = nn.BatchNorm2d(3), nn.BatchNorm2d(9)
            self.last = nn.Conv2d(9, 3, 8)

        def forward(self, x: Tensor) -> Tensor:
            a = self.first(x)
            b = self.second(torch.relu(self.norm1(a)))
            scores: Tensor = self.last(self.norm2(torch.cat([a, b, x], 1)))
            return scores.flatten(1)

    model = Dense()
    crossbn.convert_(model, window=2, unpaired=unpaired)
    with FidelityProbe(model, every=3) as probe:
        train(model, [batch(step) for step in range(4)])
    expected = [
        ("norm1", SAME_LAYER, 3),
        ("norm1", WHOLE_NETWORK, 3),
        ("norm2[3:7]", SAME_LAYER, 4),
        ("norm2[3:7]", WHOLE_NETWORK, 4),
        ("norm2[7:9]", WHOLE_NETWORK, 2),
    ]
    pooled = unpaired == "pool"  # else nothing is remembered of the images
    found = [(r.layer, r.truth, r.fidelity.channels) for r in probe.records]
    assert found == (expected if pooled else expected[:4])
    if pooled:
        assert max(errors_of(probe.records[-1])) < 1e-5  # the images do not change with the weights
    assert probe.left_out == {"norm2[7:9], same layer": "it is fed by no operator"}
