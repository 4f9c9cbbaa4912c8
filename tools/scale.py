r"""Train a small network at a learning rate that is too large, and tell what grows (docs/scale.md).

python tools/scale.py --norm cbn --weight-decay 0.01 --seeds 3
python tools/scale.py --norm cbn --order 2 --momentum 0 --steps 2000 --ledger
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import crossbn


def network(width: int = 16) -> nn.Sequential:
    """Return three blocks of convolution, norm and ReLU, and a linear layer."""
    blocks = [
        layer
        for inputs, stride in ((1, 1), (width, 2), (width, 1))
        for layer in (nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Ledger:
    """Sums of the relative growth of |p|^2 by an update, along p and across it, for groups of parameters."""

    def __init__(self, groups: dict[str, list[nn.Parameter]]) -> None:
        self.groups = groups
        self.along = dict.fromkeys(groups, 0.0)
        self.across = dict.fromkeys(groups, 0.0)

    def add(self, lr: float) -> None:
        """Book a step of plain gradient descent, without decay."""
        for name, parameters in self.groups.items():
            values = torch.cat([p.detach().flatten() for p in parameters])
            grads = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            size = float(values.square().sum())
            along = -2 * lr * float(values @ grads) / size
            self.along[name] += along
            self.across[name] += lr**2 * float(grads.square().sum()) / size - (along / 2) ** 2


def train(options: argparse.Namespace, seed: int) -> tuple[float, Ledger]:
    """Train on digits; return the largest running variance of any channel at any step, and the ledger."""
    torch.manual_seed(seed)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
    model = network()
    if options.norm == "cbn":
        how = {"order": options.order, "decay": options.decay, "weights": options.weights}
        crossbn.convert_(model, window=options.window, **how)
    norms = [module for module in model if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    convolutions = [module for module in model if isinstance(module, nn.Conv2d)]
    groups = {f"weight {i}": [module.weight] for i, module in enumerate(convolutions)}
    groups |= {f"gamma, beta {i}": list(module.parameters()) for i, module in enumerate(norms)}
    ledger, peak = Ledger(groups), 0.0
    optimizer = torch.optim.SGD(
        model.parameters(), options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(options.steps):
        chosen = torch.randint(1000, (2,), generator=generator)
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        ledger.add(options.lr)
        optimizer.step()
        peak = max([peak, *(_largest(norm.running_var) for norm in norms)])
    return peak, ledger


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.max())


def main() -> None:
    """Print a line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=("bn", "cbn"), default="cbn")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--order", type=int, default=1)
    parser.add_argument("--decay", type=float, default=1.0)
    parser.add_argument("--weights", choices=("equal", "auto"), default="equal")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ledger", action="store_true", help="growth along and across each group; for momentum 0")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    for seed in range(options.seeds):
        peak, ledger = train(options, seed)
        print(f"seed {seed}: largest running variance {peak:.2g}")
        if options.ledger:
            for name in ledger.groups:
                print(f"  {name}: along {ledger.along[name]:+.2f}, across {ledger.across[name]:+.2f}")


if __name__ == "__main__":
    main()
