"""A U-Net at batch 1 with BN, GN, IN and CBN: the Dice score, and the seams where tiles meet.

    python examples/segmentation.py --data FOLDER   # images/, instances_train.json, instances_val.json: COCO's
    python examples/segmentation.py --toy           # drawn nuclei, no download

Each test image is also cut into halves, and the logits of these are held against those of the whole image: at the seam
(the two columns where halves meet) and in the outer quarters, far from it (mean absolute difference, in standard
deviations of the logits). At the seam every network lacks what lies beyond; far from it only those norms do something
else that look at the tile.
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
    square = [image for image in listed["images"] if image["width"] == image["height"] == size]
    masks = {image["id"]: torch.zeros(size, size) for image in square}
    for instance in listed["annotations"]:
        if instance["image_id"] in masks:
            masks[instance["image_id"]] += torch.as_tensor(rle.decode(instance["segmentation"]))
    names = {image["id"]: folder / "images" / image["file_name"] for image in square}
    images = [pil_to_tensor(Image.open(names[key]).convert("RGB")) / 255 for key in list(masks)[:count]]
    return [(image, mask[None].clamp(max=1)) for image, mask in zip(images, masks.values(), strict=False)]


def train(network: nn.Module, examples: list[Example], epochs: int) -> None:
    """Train on single images."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for epoch in range(epochs):
        for i in torch.randperm(len(examples), generator=torch.Generator().manual_seed(epoch)).tolist():
            image, mask = (part[None] for part in examples[i])
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(network(image), mask).backward()
            optimizer.step()


@torch.no_grad()
def evaluate(network: nn.Module, examples: list[Example]) -> tuple[float, float, float]:
    """Return the Dice score in %, and what halves differ by from the whole: at the seam, and far from it."""
    scores, at_seam, far = [], [], []
    for image, mask in examples:
        whole = network(image[None])[0]
        scores.append(2 * ((whole > 0) * mask).sum() / ((whole > 0).sum() + mask.sum()))
        size = image.shape[2]
        halves = torch.cat([network(part) for part in image[None].chunk(2, dim=3)], dim=3)[0]
        difference = (halves - whole).abs() / whole.std()
        at_seam.append(difference[..., size // 2 - 1 : size // 2 + 1].mean())
        far.append(torch.cat([difference[..., : size // 4], difference[..., -size // 4 :]], dim=2).mean())
    return 100 * torch.stack(scores).mean().item(), torch.stack(at_seam).mean().item(), torch.stack(far).mean().item()


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
    elif args.data is not None:
        train_data, test_data = read(args.data, "train", args.images), read(args.data, "val", args.images)
        epochs, depth = args.epochs, 5
    else:
        parser.error("give --data FOLDER or --toy")
    torch.manual_seed(0)
    channels = (256, 128, 64, 32, 16)[-depth:]
    start = smp.Unet("resnet18", encoder_depth=depth, encoder_weights=None, decoder_channels=channels)
    for norm in NORMS:
        network = copy.deepcopy(start)
        if norm == "cbn":
            crossbn.convert_(network, batch_size=1)
        elif norm != "bn":
            crossbn.swap_norm_(network, norm)
        train(network, train_data, epochs)
        dice, at_seam, far = evaluate(network.eval(), test_data)
        print(
            f"{norm}: Dice {dice:.1f} %, halves differ by {at_seam:.2f} at the seam, {far:.3f} far from it", flush=True
        )


if __name__ == "__main__":
    main()
