"""A U-Net at batch 1 with BN, GN, IN and CBN: the Dice score, and the seams where tiles meet.

    python examples/segmentation.py --data FOLDER   # images/, instances_train.json, instances_val.json: COCO's
    python examples/segmentation.py --toy           # drawn nuclei, no download

Logits of two halves are held against those of the whole image, in the two columns where the halves meet (mean absolute
difference in standard deviations). Without overlap every network sees zeros in place of the other half, and all norms
have a seam. With overlap (a quarter of the image, cut off again) what remains is the norm's: GN and IN use a tile's
statistics, BN and CBN constants. Where images differ in brightness GN and IN, which remove it, segment better than CBN.
"""

import argparse
import copy
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn

crossbn.compat.ensure_torchvision()  # for a torchvision of another build than torch; it does nothing elsewhere

import segmentation_models_pytorch as smp

NORMS = ("bn", "gn", "in", "cbn")
Example = tuple[Tensor, Tensor]


def draw(count: int, size: int = 64) -> list[Example]:
    """Draw bright discs on a background whose brightness and noise differ from image to image."""
    random, examples = torch.Generator().manual_seed(count), []
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for _ in range(count):
        mask = torch.zeros(size, size, dtype=torch.bool)
        for row, column, radius in torch.randint(3, size - 3, (6, 3), generator=random).tolist():
            mask |= (rows - row) ** 2 + (columns - column) ** 2 < (3 + radius / 12) ** 2
        level, contrast = torch.rand(2, generator=random).tolist()
        image = 0.5 * level + (0.1 + 0.4 * contrast) * mask + 0.1 * torch.randn(size, size, generator=random)
        examples.append((image.expand(3, -1, -1), mask[None].float()))
    return examples


def read(folder: Path, part: str, count: int, size: int = 256) -> list[Example]:
    """Read images that are `size` pixels high and wide, with the union of their instances."""
    from PIL import Image
    from pycocotools import mask as rle
    from torchvision.transforms.functional import pil_to_tensor

    listed = json.loads((folder / f"instances_{part}.json").read_text())
    square = [image for image in listed["images"] if image["width"] == image["height"] == size][:count]
    masks = {image["id"]: torch.zeros(1, size, size) for image in square}
    for instance in listed["annotations"]:
        if instance["image_id"] in masks:
            masks[instance["image_id"]][0][torch.as_tensor(rle.decode(instance["segmentation"])) > 0] = 1
    images = [Image.open(folder / "images" / image["file_name"]).convert("RGB") for image in square]
    return [(pil_to_tensor(image) / 255, mask) for image, mask in zip(images, masks.values(), strict=True)]


def train(network: nn.Module, examples: list[Example], epochs: int) -> None:
    """Train on single images."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for epoch in range(epochs):
        for i in torch.randperm(len(examples), generator=torch.Generator().manual_seed(epoch)).tolist():
            image, mask = (part[None] for part in examples[i])
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(network(image), mask).backward()
            optimizer.step()


def tiled(network: nn.Module, image: Tensor, margin: int) -> Tensor:
    """Return the logits of two halves side by side, each computed with `margin` columns of the other one, then cut."""
    middle = image.shape[2] // 2
    left, right = image[None, ..., : middle + margin], image[None, ..., middle - margin :]
    return torch.cat([network(left)[..., :middle], network(right)[..., margin:]], dim=3)[0]


@torch.no_grad()
def evaluate(network: nn.Module, examples: list[Example]) -> list[float]:
    """Return the Dice score in %, and what halves differ by from the whole at the seam, without and with a margin."""
    facts = []
    for image, mask in examples:
        whole, middle = network(image[None])[0], image.shape[2] // 2
        dice = 2 * ((whole > 0) * mask).sum() / ((whole > 0).sum() + mask.sum())
        seams = [(tiled(network, image, margin) - whole)[..., middle - 1 : middle + 1] for margin in (0, middle // 2)]
        facts.append(torch.stack([100 * dice, *(seam.abs().mean() / whole.std() for seam in seams)]))
    return torch.stack(facts).mean(0).tolist()


def main() -> None:
    """Train the same network with each norm."""
    parser = argparse.ArgumentParser(description="A U-Net at batch 1")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="drawn images")
    args = parser.parse_args()
    if args.toy:
        train_data, test_data, epochs, depth = draw(40), draw(20), 2, 2
    elif args.data is None or not (args.data / "instances_train.json").is_file():
        parser.error(f"give --toy, or --data FOLDER with instances_train.json in it, got {args.data}")
    else:
        train_data, test_data = (read(args.data, part, args.images) for part in ("train", "val"))
        epochs, depth = args.epochs, 5
    torch.manual_seed(0)
    start = smp.Unet("resnet18", depth, encoder_weights=None, decoder_channels=(256, 128, 64, 32, 16)[-depth:])
    for norm in NORMS:
        network = copy.deepcopy(start)
        if norm == "cbn":
            crossbn.convert_(network, batch_size=1)
        elif norm != "bn":
            crossbn.swap_norm_(network, norm)
        train(network, train_data, epochs)
        dice, cut, overlapping = evaluate(network.eval(), test_data)
        print(f"{norm}: Dice {dice:.1f} %, at the seam {cut:.2f}, with overlap {overlapping:.3f}", flush=True)


if __name__ == "__main__":
    main()
