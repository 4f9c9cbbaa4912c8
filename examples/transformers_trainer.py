"""The Trainer of transformers with a ResNet at batch 2: one callback, and a training that resumes.

    python examples/transformers_trainer.py [--toy]

Most models of transformers have layer normalization, and nothing to convert; this is for those with BatchNorm.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

import crossbn

crossbn.compat.ensure_torchvision()  # for a torchvision of another build than torch; it does nothing elsewhere

from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from crossbn.integrations.transformers import CrossIterationNorm


class Digits(Dataset[dict[str, Tensor]]):
    """Handwritten digits in the form that models of transformers take."""

    def __init__(self, places: slice) -> None:
        digits = load_digits()
        images = torch.as_tensor(digits.images[places], dtype=torch.float32)[:, None] / 16
        self.images = torch.nn.functional.interpolate(images, size=32).repeat(1, 3, 1, 1)
        self.classes = torch.as_tensor(digits.target[places])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.classes[index]}


def make_trainer(name: str, output: str, steps: int, images: Digits) -> Trainer:
    """Return a Trainer of a small ResNet with BN or CBN."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10)
    arguments = TrainingArguments(
        output_dir=f"{output}/{name}",
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        max_steps=steps,
        save_steps=steps // 2,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    callbacks = [CrossIterationNorm()] if name == "CBN" else []
    return Trainer(ResNetForImageClassification(config), arguments, train_dataset=images, callbacks=callbacks)


def main() -> None:
    """Train with BN and CBN; then resume the second half of CBN and compare the weights."""
    parser = argparse.ArgumentParser(description="The Trainer of transformers at batch 2")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", default="trainer-results")
    parser.add_argument("--toy", action="store_true", help="100 steps")
    args = parser.parse_args()
    steps = 100 if args.toy else args.steps
    images, tests = Digits(slice(0, 1200)), Digits(slice(1200, None))
    for name in ("BN", "CBN"):
        trainer = make_trainer(name, args.output, steps, images)
        trainer.train()
        with torch.no_grad():
            logits = trainer.model.eval()(tests.images.to(trainer.model.device)).logits
        hits = logits.argmax(1).cpu() == tests.classes
        print(f"{name}: {100 * hits.float().mean():.1f} %")
    weights = trainer.model.state_dict()
    resumed = make_trainer("CBN", args.output, steps, images)
    resumed.train(resume_from_checkpoint=f"{args.output}/CBN/checkpoint-{steps // 2}")
    equal = all(torch.equal(value, weights[key]) for key, value in resumed.model.state_dict().items())
    print(f"resumed, equal: {equal}")


if __name__ == "__main__":
    main()
