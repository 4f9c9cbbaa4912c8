"""The best that statistics over several steps could do: remembered images go through the network again at each step.

A cross-iteration norm approximates what batch norm would compute if the last steps' examples came back with today's
weights. Here they do come back. That costs as much as a batch of all of them and is no way to train; it tells how far a
norm with the same window is from what it approximates, and which part of the gradient the distance is due to.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.lab.fidelity.truth import split_steps
from crossbn.pairing import find_pairs

GRADIENTS = ("full", "own", "none")


class ExactWindow(nn.Module):
    """A network with batch norms whose statistics in training are those of the last `window` batches, exactly.

    The scores, and so the loss, are of the current images alone; the classes of the remembered ones are never asked
    for. What these contribute to the gradient by way of the statistics is a choice:

    - "full": everything. No norm over that window can have more.
    - "own": their path into the weights of the operator right before each norm. That is all that a norm which knows
      its own layer only can have.
    - "none": nothing, their part of the statistics is a constant.

    Evaluation is the network's own. A training forward without gradients looks at the remembered images and remembers
    nothing. The remembered images are in the `state_dict`.

    Args:
        network: takes one batch of images; its norms are plain batch norms.
        window: batches, the current one included.
        gradient: one of `GRADIENTS`.
        burn_in: training forwards first in which the current batch is alone.

    Raises:
        ValueError: for a setting out of range, or with "own" for a norm that reads a sum, where "the operator right
            before" is not all that it reads.

    Example:
        >>> network = ExactWindow(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)), window=2)
        >>> _ = network(torch.tensor([[0.0], [1.0]]))
        >>> scores = network(torch.tensor([[0.5], [0.5]]))
        >>> bool(scores.abs().max() < 1e-5)  # in the middle of all four
        True
    """

    def __init__(self, network: nn.Module, window: int, *, gradient: str = "full", burn_in: int = 0) -> None:
        super().__init__()
        if gradient not in GRADIENTS:
            raise ValueError(f"gradient must be one of {', '.join(map(repr, GRADIENTS))}, got {gradient!r}")
        if window < 1 or burn_in < 0:
            raise ValueError(f"window must be at least 1 and burn_in at least 0, got {window} and {burn_in}")
        self.network = network
        self.window = window
        self.burn_in = burn_in
        self._burnt = 0
        self._remembered: list[Tensor] = []
        self._sizes: tuple[int, int] | None = None  # of the current and the remembered part, during a joint forward
        for name in _places_to_cut(network, gradient):
            network.get_submodule(name).register_forward_pre_hook(partial(self._cut, name))

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's scores of `images` [N, ...]."""
        if not self.training:
            return self.network(images)
        scores = self._joint_forward(images) if self._remembered else self.network(images)
        if torch.is_grad_enabled():
            self._remember(images)
        return scores

    def _joint_forward(self, images: Tensor) -> Tensor:
        joined = torch.cat([images, *self._remembered])
        self._sizes = len(images), len(joined) - len(images)
        try:
            return self.network(joined)[: len(images)]
        finally:
            self._sizes = None

    def _remember(self, images: Tensor) -> None:
        if self._burnt < self.burn_in:
            self._burnt += 1
            return
        kept = [images.detach(), *self._remembered]  # the latest first
        self._remembered = kept[: self.window - 1]

    def _cut(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the gradient off the remembered part of a module's input."""
        if self._sizes is None:
            return args
        current, remembered = split_steps(args[0], self._sizes, name)
        return (torch.cat([current, remembered.detach()]), *args[1:])

    def get_extra_state(self) -> dict[str, Any]:
        """Return what a training goes on from beside parameters and buffers."""
        return {"burnt": self._burnt, "remembered": list(self._remembered)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_extra_state` returned."""
        device = next((parameter.device for parameter in self.parameters()), None)
        self._burnt = state["burnt"]
        self._remembered = [images.to(device) for images in state["remembered"]]


def _places_to_cut(network: nn.Module, gradient: str) -> list[str]:
    """Return the names of the modules at whose input the remembered part becomes a constant.

    Nothing beyond them is reached: what a remembered example does to a loss of others, it does through a norm.
    """
    if gradient == "full":
        return []
    places: dict[str, None] = {}
    for name, pairing in find_pairs(network).items():
        if gradient == "none" or not pairing.producers:
            places[name] = None
            continue
        if not all(segment.direct for segment in pairing.segments):
            reasons = ", ".join(segment.reason for segment in pairing.segments if not segment.direct)
            raise ValueError(f"{name} has no layer of its own to give a gradient to: it reads {reasons}")
        places.update(dict.fromkeys(pairing.producers))
    return list(places)
