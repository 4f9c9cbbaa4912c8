"""Every norm once more: slow, in float64, one channel or example at a time, plain autograd.

A reference takes the input [N, C, ...], the norm's parameters and buffers by name, and whether it trains.
"""

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]
Reference = Callable[[Tensor, State, bool], Tensor]

EPS = 1e-3
GROUPS = 3
STEPS = 1000
"""Length of the schedules in the tests; `num_batches_tracked` is 400 there."""


def standardized(values: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return (values - mean) / torch.sqrt(var + EPS)


def by_its_own(values: Tensor) -> Tensor:
    return standardized(values, values.mean(), values.var(correction=0))


def affine(normalized: Tensor, state: State) -> Tensor:
    channels = [
        normalized[:, c] * state["weight"][c] + state["bias"][c] if "weight" in state else normalized[:, c]
        for c in range(normalized.shape[1])
    ]
    return torch.stack(channels, 1)


def batch(x: Tensor, state: State, training: bool) -> Tensor:
    if not training:
        return frozen(x, state, training)
    return affine(torch.stack([by_its_own(x[:, c]) for c in range(x.shape[1])], 1), state)


def frozen(x: Tensor, state: State, _: bool) -> Tensor:
    means, variances = state["running_mean"], state["running_var"]
    return affine(torch.stack([standardized(x[:, c], means[c], variances[c]) for c in range(x.shape[1])], 1), state)


def instance(x: Tensor, state: State, _: bool) -> Tensor:
    return affine(torch.stack([torch.stack([by_its_own(channel) for channel in example]) for example in x]), state)


def layer(x: Tensor, state: State, _: bool) -> Tensor:
    return affine(torch.stack([by_its_own(example) for example in x]), state)


def group(x: Tensor, state: State, _: bool) -> Tensor:
    parts = [torch.cat([by_its_own(part) for part in example.chunk(GROUPS)]) for example in x]
    return affine(torch.stack(parts), state)


def renorm(x: Tensor, state: State, training: bool) -> Tensor:
    if not training:
        return frozen(x, state, training)
    # Paper: 5,000 to 40,000 and 5,000 to 25,000 steps, here scaled by 1 / 100: at step 400 both have ended, at 3 and 5.
    channels = []
    for c in range(x.shape[1]):
        mean, std = x[:, c].mean(), torch.sqrt(x[:, c].var(correction=0) + EPS)
        running_std = torch.sqrt(state["running_var"][c] + EPS)
        r = (std / running_std).clamp(1 / 3, 3).detach()
        d = ((mean - state["running_mean"][c]) / running_std).clamp(-5, 5).detach()
        channels.append((x[:, c] - mean) / std * r + d)
    return affine(torch.stack(channels, 1), state)


def batch_instance(x: Tensor, state: State, training: bool) -> Tensor:
    plain = {name: value for name, value in state.items() if name not in ("weight", "bias")}
    of_batch, of_instance = batch(x, plain, training), instance(x, plain, training)
    gates = state["gate"]
    mixed = [gates[c] * of_batch[:, c] + (1 - gates[c]) * of_instance[:, c] for c in range(x.shape[1])]
    return affine(torch.stack(mixed, 1), state)


def softmax(logits: Tensor) -> Tensor:
    return logits.exp() / logits.exp().sum()


def nearest_outside(logits: Tensor, radius: float) -> Tensor:
    """SparsestMax for the case that the nearest point of the simplex is within it and, pushed out, still is."""
    centre = torch.full_like(logits, 1 / len(logits))
    inner = logits - (logits.sum() - 1) / len(logits)
    assert (inner > 0).all()
    offset = inner - centre
    return inner if offset.norm() >= radius else centre + radius * offset / offset.norm()


def switch(x: Tensor, state: State, training: bool, ratios: Callable[[Tensor], Tensor] = softmax) -> Tensor:
    first = 1 if x.ndim == 2 else 0  # without space there are no statistics of an instance
    of_mean, of_var = (ratios(state[f"{kind}_logits"][first:]) for kind in ("mean", "var"))
    rows = []
    for n, c in itertools.product(range(x.shape[0]), range(x.shape[1])):
        sets = [x[n, c], x[n], x[:, c]]
        means = [values.mean() for values in sets]
        variances = [values.var(correction=0) for values in sets]
        if not training:
            means[2], variances[2] = state["running_mean"][c], state["running_var"][c]
        mean = sum(p * m for p, m in zip(of_mean, means[first:], strict=True))
        var = sum(p * v for p, v in zip(of_var, variances[first:], strict=True))
        assert isinstance(mean, Tensor)
        assert isinstance(var, Tensor)
        rows.append(standardized(x[n, c], mean, var))
    return affine(torch.stack(rows).reshape(x.shape), state)


def sparse_switch(x: Tensor, state: State, training: bool) -> Tensor:
    def ratios(logits: Tensor) -> Tensor:
        return nearest_outside(logits, 0.4 * math.sqrt((len(logits) - 1) / len(logits)))

    return switch(x, state, training, ratios)


REFERENCES: dict[str, Reference] = {
    "bn": batch,
    "sync_bn": batch,
    "frozen_bn": frozen,
    "in": instance,
    "ln": layer,
    "gn": group,
    "brn": renorm,
    "bin": batch_instance,
    "kn": batch,
    "sn": switch,
    "ssn": sparse_switch,
    "naive_cbn": batch,
    "cbn": batch,
}
