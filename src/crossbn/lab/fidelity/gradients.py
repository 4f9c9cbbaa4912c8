"""How strongly a layer's statistics depend on its own weights and on those of the layers before it.

| paper | here | what it is |
|---|---|---|
| mu^l, nu^l | mean, second_moment [C] | moments of the input of norm l, over the current batch and space |
| theta^r | weight | of the operator that feeds norm r |
| g(l, r) | norm of the Jacobian | Frobenius norm of d mean^l / d theta^r or d nu^l / d theta^r |

Layer l - 1 is the norm right before l on the longest way through the network: among the norms whose output reaches the
input of l without another norm between, the one that itself has the most norms before it (the later one, if two have).
So a residual block continues its convolutions and not its shortcut, and after a concatenation comes its deepest branch.

A Jacobian of all channels is never formed: for random signs u, the expectation of |u^T J|^2 is the squared norm, and
u^T J takes one backward pass through a few layers. For r = l a single one is exact, since the rows of J, each with a
channel's own weights, do not overlap.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn.pairing import find_pairs


@dataclass(frozen=True)
class LayerGradients:
    """Squared norms of the gradients of one layer's statistics.

    Attributes:
        norm: of layer l, by name.
        operators: that feed the norms l, l - 1, l - 2 and so on, as far as there are.
        mean: squared norm of d mean^l / dW for each of them.
        second_moment: squared norm of d nu^l / dW for each of them.
    """

    norm: str
    operators: tuple[str, ...]
    mean: tuple[float, ...]
    second_moment: tuple[float, ...]


class Ratios(NamedTuple):
    """Norms of gradients relative to those for the layer's own weights, averaged over layers.

    Entry i is for r = l - 1 - i: the mean of |d/dW_r| / |d/dW_l| over the layers that have such an r.
    """

    mean: tuple[float, ...]
    second_moment: tuple[float, ...]


def gradient_norms(
    model: nn.Module, batch: Tensor, *, probes: int = 4, reach: int = 2, generator: torch.Generator | None = None
) -> list[LayerGradients]:
    """Estimate how the statistics of every layer depend on its weights and on those of the layers before it.

    The norms act as in training. The model is copied and left as it is, and so is the state of torch's random numbers.
    Norms that are not fed by one operator directly are left out, and end the way back from layers after them.

    Args:
        model: with BatchNorm.
        batch: its input.
        probes: random projections; the relative error of a squared norm falls with their root.
        reach: how many layers back.
        generator: of the projections; None for one with seed 0.

    Example:
        >>> layers = [(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(3)]
        >>> model = nn.Sequential(*(module for layer in layers for module in layer))
        >>> [found.operators for found in gradient_norms(model, torch.randn(2, 4, 9))]
        [('0',), ('3', '0'), ('6', '3', '0')]
    """
    generator = generator or torch.Generator().manual_seed(0)
    model = copy.deepcopy(model).train()
    with torch.random.fork_rng():
        pairs = find_pairs(model, (batch,))
        moments, chains = _watch(model, batch, pairs)
    operators = {
        name: pairing.producers[0]
        for name, pairing in pairs.items()
        if len(pairing.segments) == 1 and pairing.segments[0].direct
    }
    found = []
    for name in (name for name in moments if name in operators):
        chain = _while_known(chains[name][: reach + 1], operators)
        weights = [model.get_parameter(f"{operator}.weight") for operator in chain]
        mean, second_moment = (
            sample_jacobian_norms(moment, weights, probes, generator).mean(0).tolist() for moment in moments[name]
        )
        found.append(LayerGradients(name, chain, tuple(mean), tuple(second_moment)))
    return found


def sample_jacobian_norms(outputs: Tensor, inputs: Sequence[Tensor], probes: int, generator: torch.Generator) -> Tensor:
    """Return unbiased samples [probes, inputs] of the squared Frobenius norms of d outputs / d inputs.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> sample_jacobian_norms(2 * x, [x], 2, torch.Generator())
        tensor([[12.],
                [12.]], dtype=torch.float64)
    """
    samples = []
    for _ in range(probes):
        signs = 2 * torch.randint(2, outputs.shape, generator=generator) - 1
        projected = torch.autograd.grad(outputs, inputs, signs.to(outputs), retain_graph=True, materialize_grads=True)
        samples.append(torch.stack([gradient.double().square().sum() for gradient in projected]))
    return torch.stack(samples)


def average_ratios(layers: Iterable[LayerGradients]) -> Ratios:
    """Return the ratios of the norms to that for r = l, averaged over the layers.

    Example:
        >>> average_ratios([LayerGradients("norm", ("b", "a"), (4.0, 1.0), (9.0, 1.0))])
        Ratios(mean=(0.5,), second_moment=(0.3333333333333333,))
    """
    layers = list(layers)
    return Ratios(_average(layer.mean for layer in layers), _average(layer.second_moment for layer in layers))


def _average(squares: Iterable[Sequence[float]]) -> tuple[float, ...]:
    ratios: dict[int, list[float]] = {}
    for own, *earlier in squares:
        for distance, square in enumerate(earlier):
            ratios.setdefault(distance, []).append((square / own) ** 0.5)
    return tuple(sum(found) / len(found) for found in ratios.values())


def _watch(
    model: nn.Module, batch: Tensor, norms: Iterable[str]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, tuple[str, ...]]]:
    """Run the model; return each norm's moments in order of execution, and the norms from it on back."""
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    makers: dict[Any, str] = {}
    chains: dict[str, tuple[str, ...]] = {}

    def before(name: str, x: Tensor) -> None:
        positions = [0, *range(2, x.dim())]
        moments[name] = x.mean(positions), x.square().mean(positions)
        previous = [chains[other] for other in _norms_before(x.grad_fn, makers)]
        # Chains of equal length: the later, so that the order of the search does not decide.
        longest = max(previous, key=lambda chain: (len(chain), list(chains).index(chain[0])), default=())
        chains[name] = (name, *longest)

    def after(name: str, y: Tensor) -> None:
        makers[y.grad_fn] = name

    for name in norms:  # the model is a copy, which the hooks go with
        norm = model.get_submodule(name)
        norm.register_forward_pre_hook(lambda _, args, name=name: before(name, args[0]))
        norm.register_forward_hook(lambda _, __, output, name=name: after(name, output))
    with torch.enable_grad():
        model(batch)
    return moments, chains


def _norms_before(node: Any, makers: dict[Any, str]) -> list[str]:
    """Return the norms that a node of autograd's graph depends on, without those beyond another norm."""
    found, seen, todo = [], {None}, [node]
    while todo:
        node = todo.pop()
        if node in makers:
            found.append(makers[node])
        elif node not in seen:
            seen.add(node)
            todo += [source for source, _ in node.next_functions]
    return list(dict.fromkeys(found))


def _while_known(chain: Sequence[str], operators: dict[str, str]) -> tuple[str, ...]:
    """Return the operators of a chain of norms, up to the first norm that has none."""
    known = []
    for name in chain:
        if name not in operators:
            break
        known.append(operators[name])
    return tuple(known)
