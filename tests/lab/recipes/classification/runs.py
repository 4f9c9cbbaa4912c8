"""Small runs, and how two of them compare."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.lab.recipes.classification import Outcome, Recipe, train

SMALL = Recipe(
    data="digits", model="resnet8", width=4, batch_size=4, epochs=2, train_images=40, test_images=30, learning_rate=0.02
)
# Of a checkpoint, what differs between two runs that compute the same.
_TIMES = tuple(f"classification/{name}" for name in ("seconds", "seconds_per_step", "times/busy", "times/waited"))


class CrashError(RuntimeError):
    """The run ends here, as if the machine had stopped."""


class Fragile(nn.Module):
    """A network that fails in the forward of that number."""

    def __init__(self, network: nn.Module, forward: int) -> None:
        super().__init__()
        self.network = network
        self.left = forward

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.left == 0:
                raise CrashError
            self.left -= 1
        return self.network(x)


def finish(recipe: Recipe, folder: Path) -> tuple[Outcome, dict[str, Any]]:
    """Train to the end; return what came of it and the last checkpoint."""
    outcome = train(recipe, folder)
    return outcome, torch.load(folder / "last.ckpt", weights_only=True)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return where two checkpoints differ in anything but times."""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path} has other keys: {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [line for key in a for line in differences(a[key], b[key], f"{path}/{key}".lstrip("/"))]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{path} has another length"]
        return [line for i, pair in enumerate(zip(a, b, strict=True)) for line in differences(*pair, f"{path}/{i}")]
    same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
    return [] if same or path in _TIMES else [path]
