"""A YOLO of ultralytics at batch 2, with one callback.

    python examples/yolo.py --data coco8.yaml   # any data set of ultralytics
    python examples/yolo.py --toy               # drawn squares, no download

What ultralytics evaluates and saves, a moving average of the weights, stays a BatchNorm network. At 16 images or more,
which these networks are usually trained with, CBN is BatchNorm.
"""

import argparse
from pathlib import Path

import torch
from PIL import Image
from torch.nn import BatchNorm2d

import crossbn

crossbn.compat.ensure_torchvision()  # for a torchvision of another build than torch; it does nothing elsewhere

from ultralytics import YOLO

from crossbn.integrations import ultralytics


def draw(folder: Path, count: int, size: int = 64) -> Path:
    """Draw bright squares in noise, in the folders that ultralytics wants; return the description of the data set."""
    random = torch.Generator().manual_seed(0)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = torch.randint(0, 100, (size, size, 3), generator=random, dtype=torch.uint8)
            left, top, side = (torch.randint(8, 24, (3,), generator=random)).tolist()
            pixels[top : top + side, left : left + side] += 120
            Image.fromarray(pixels.numpy()).save(folder / "images" / part / f"{i}.png")
            box = ((left + side / 2) / size, (top + side / 2) / size, side / size, side / size)
            (folder / "labels" / part / f"{i}.txt").write_text(" ".join(map(str, (0, *box))))
    description = folder / "squares.yaml"
    description.write_text(f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\nnames:\n  0: square\n")
    return description


def main() -> None:
    """Train, and tell what was trained and what was saved."""
    parser = argparse.ArgumentParser(description="A YOLO at batch 2")
    parser.add_argument("--model", default="yolo11n.yaml")
    parser.add_argument("--data", help="a data set of ultralytics")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("yolo-results"))
    parser.add_argument("--toy", action="store_true", help="drawn squares, two epochs")
    args = parser.parse_args()
    if not args.toy and not args.data:
        parser.error("give --data or --toy")
    data = draw(args.output / "squares", 8) if args.toy else args.data
    model = YOLO(args.model)
    ultralytics.add_callback(model)
    model.train(
        data=str(data),
        batch=2,
        epochs=2 if args.toy else args.epochs,
        imgsz=64 if args.toy else 640,
        project=str(args.output.resolve()),
        name="training",
        exist_ok=True,
        workers=0,
        plots=False,
    )
    trained = [module for module in model.trainer.model.modules() if isinstance(module, crossbn.nn.CrossIterBatchNorm)]
    saved = [module for module in YOLO(model.trainer.last).model.modules() if isinstance(module, BatchNorm2d)]
    print(f"{len(trained)} norms trained with windows of {trained[0].settings.window}")
    print(f"{len(saved)} norms saved, BatchNorm: {all(type(norm) is BatchNorm2d for norm in saved)}")


if __name__ == "__main__":
    main()
