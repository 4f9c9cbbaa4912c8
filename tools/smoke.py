"""Is what `pip install` made usable? `python tools/smoke.py [--compiled]`, with torch and crossbn installed.

It trains a small network for some steps and compares with BatchNorm what must be equal to it. `--compiled` also demands
that compiled code is in use: without it an optional extension that failed to build would go unnoticed.
"""

import argparse

import torch
from torch import nn

import crossbn
from crossbn.ops import library

STEPS = 4


def make_network() -> nn.Sequential:
    """Return convolution, BatchNorm and ReLU twice, with the same weights at every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for in_channels, channels in ((3, 8), (8, 8)):
        layers += [nn.Conv2d(in_channels, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


def train(network: nn.Module) -> list[float]:
    """Take some steps at batches of two; return the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = (network(torch.randn(2, 3, 8, 8)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Convert, train, fold and revert; end with a sentence about what is wrong, if something is."""
    parser = argparse.ArgumentParser(description="Is what `pip install` made usable?")
    parser.add_argument("--compiled", action="store_true", help="compiled code must be in use")
    if parser.parse_args().compiled and not library.is_available():
        raise SystemExit("crossbn has no compiled code here")

    networks = {window: make_network() for window in (None, 1, 8)}
    for window, network in networks.items():
        if window is not None and len(crossbn.convert_(network, window=window).compensated) != 2:
            raise SystemExit("crossbn did not find the convolutions of its norms")
    losses = {window: train(network) for window, network in networks.items()}
    if losses[1] != losses[None]:
        raise SystemExit(f"window 1 is not BatchNorm: {losses[1]} where that has {losses[None]}")
    if losses[8][0] != losses[None][0] or losses[8][1:] == losses[None][1:]:
        raise SystemExit("window 8 does not pool from the second step on")

    network, x = networks[8].eval(), torch.randn(2, 3, 8, 8)
    expected, folded = network(x), crossbn.fold(network)
    crossbn.revert_(network)
    if not torch.equal(network(x), expected) or not torch.allclose(folded(x), expected, atol=1e-5):
        raise SystemExit("a reverted or a folded network computes something else")
    print(f"crossbn {crossbn.__version__} in {crossbn.__path__[0]} works, compiled code: {library.is_available()}")


if __name__ == "__main__":
    main()
