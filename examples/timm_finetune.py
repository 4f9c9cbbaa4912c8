"""Fine-tune a network of timm at batch 2: frozen BatchNorm, BatchNorm, and CBN with the checkpoint's statistics.

    python examples/timm_finetune.py --model resnet18 --data FOLDER   # a folder for each class; ImageNet weights
    python examples/timm_finetune.py --toy                            # digits, no download

Without weights to download, the toy makes its own checkpoint: digits below 5 at batch 32; then it learns the others.
Compare each norm at its own best --lr. Where frozen BatchNorm is good enough, it is cheaper than CBN.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import crossbn

crossbn.compat.ensure_torchvision()  # for a torchvision of another build than torch; it does nothing elsewhere

import timm

NORMS = ("frozen BN", "BN", "CBN")


def digits(low: int, high: int, size: int = 32) -> TensorDataset:
    """Return the digits from `low` to `high`, as colour images, with classes that begin at 0."""
    images, classes = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    chosen = (classes >= low) & (classes < high)
    pixels = F.interpolate(images[chosen].float().reshape(-1, 1, 8, 8) / 16, size=size, mode="bilinear")
    return TensorDataset(pixels.repeat(1, 3, 1, 1), classes[chosen] - low)


def folder(path: str) -> Dataset[tuple[Tensor, int]]:
    """Return the images of a folder that has one folder for each class."""
    from torchvision import datasets, transforms

    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return datasets.ImageFolder(path, transforms.Compose([*steps, normalize]))


def prepare(model: nn.Module, norm: str, batch_size: int) -> None:
    """Give a network with a checkpoint one of the norms."""
    if norm == "CBN":
        print(crossbn.convert_(model, batch_size=batch_size, prior="running").summary())
    elif norm == "frozen BN":
        crossbn.swap_norm_(model, "frozen_bn")


def train(model: nn.Module, data: Dataset[tuple[Tensor, int]], batch_size: int, lr: float, epochs: int) -> None:
    """Train with SGD and a falling rate."""
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    model.train()
    for _ in range(epochs):
        for images, classes in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset[tuple[Tensor, int]]) -> float:
    """Return how many images are classified rightly, in %."""
    model.eval()
    hits = [model(images).argmax(1) == classes for images, classes in DataLoader(data, 64)]
    return 100 * torch.cat(hits).float().mean().item()


def main() -> None:
    """Fine-tune the same checkpoint with each norm."""
    parser = argparse.ArgumentParser(description="Fine-tune a network of timm at a small batch")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--data", help="a folder of images for each class")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="a small network and digits, no download")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.toy:
        checkpoint = timm.create_model("test_resnet", num_classes=5)
        train(checkpoint, digits(0, 5), batch_size=32, lr=0.1, epochs=4)
        checkpoint.reset_classifier(5)
        data: Dataset[tuple[Tensor, int]] = digits(5, 10)
        args.epochs, share = 1, 0.25
    elif args.data:
        data, share = folder(args.data), 0.8
        checkpoint = timm.create_model(args.model, pretrained=True, num_classes=len(data.classes))
    else:
        parser.error("give --data FOLDER or --toy")
    train_data, test_data = random_split(data, [share, 1 - share], torch.Generator().manual_seed(0))
    for norm in NORMS:
        model = copy.deepcopy(checkpoint)
        prepare(model, norm, args.batch_size)
        train(model, train_data, args.batch_size, args.lr, args.epochs)
        print(f"{norm}: {accuracy(model, test_data):.1f} %")


if __name__ == "__main__":
    main()
