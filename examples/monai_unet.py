"""MONAI's 3D U-Net at batch 1: patches of volumes in training, a sliding window at inference.

    python examples/monai_unet.py [--toy]

Volumes are drawn: a bright ellipsoid in noise. Replace `draw` by MONAI's CacheDataset and its transforms for your own.
The network takes `norm="BATCH"` and is converted; MONAI's default, instance normalization, is trained beside it. This
shows that it works, not that it helps: a patch of 24x24x24 voxels is enough for BatchNorm, which is ahead of CBN in the
toy. CBN is for networks whose deep maps are a few voxels.
"""

import argparse

import torch
from torch import Tensor, nn

import crossbn

crossbn.compat.ensure_torchvision()  # for a torchvision of another build than torch; it does nothing elsewhere

from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet

PATCH, SIZE = 24, 32


def draw(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Draw volumes with their masks."""
    random, volumes = torch.Generator().manual_seed(seed), []
    axes = torch.meshgrid(*[torch.arange(SIZE)] * 3, indexing="ij")
    for _ in range(count):
        centre = torch.randint(8, SIZE - 8, (3,), generator=random).tolist()
        radii = (4 + 5 * torch.rand(3, generator=random)).tolist()
        mask = sum(((a - c) / r) ** 2 for a, c, r in zip(axes, centre, radii, strict=True)) < 1
        level = torch.rand(1, generator=random)
        image = level + 0.5 * mask + 0.2 * torch.randn(SIZE, SIZE, SIZE, generator=random)
        volumes.append((image[None, None], mask[None, None].float()))
    return volumes


def crop(volume: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the same patch of image and mask, from anywhere."""
    corner = torch.randint(0, SIZE - PATCH + 1, (3,)).tolist()
    places = tuple(slice(start, start + PATCH) for start in corner)
    return [part[(..., *places)] for part in volume]


def train(network: nn.Module, volumes: list[tuple[Tensor, Tensor]], epochs: int) -> None:
    """Train on one patch at a time."""
    torch.manual_seed(0)
    loss_of = DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    for _ in range(epochs):
        for i in torch.randperm(len(volumes)).tolist():
            image, mask = crop(volumes[i])
            optimizer.zero_grad()
            loss_of(network(image), mask).backward()
            optimizer.step()


@torch.no_grad()
def dice(network: nn.Module, volumes: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean Dice score of whole volumes, in %."""
    network.eval()
    metric = DiceMetric()
    for image, mask in volumes:
        logits = sliding_window_inference(image, (PATCH,) * 3, sw_batch_size=1, predictor=network, overlap=0.25)
        metric(logits > 0, mask)
    return 100 * metric.aggregate().item()


def main() -> None:
    """Train with three norms."""
    parser = argparse.ArgumentParser(description="MONAI's 3D U-Net at batch 1")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="few volumes, two epochs")
    args = parser.parse_args()
    volumes, tests = draw(16 if args.toy else 64, seed=0), draw(6 if args.toy else 16, seed=1)
    for name in ("instance", "batch", "cbn"):
        torch.manual_seed(0)
        norm = "INSTANCE" if name == "instance" else "BATCH"
        network = UNet(3, 1, 1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, norm=norm)
        if name == "cbn":
            print(crossbn.convert_(network, batch_size=1).summary())
        train(network, volumes, 2 if args.toy else args.epochs)
        print(f"{name}: Dice {dice(network, tests):.1f} %", flush=True)


if __name__ == "__main__":
    main()
