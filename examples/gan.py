"""A GAN whose discriminator sees real and generated images in batches of their own, four at a time.

    python examples/gan.py [--toy]

The statistics of real and of generated images differ, so they must not be pooled: `crossbn.stream("generated")` gives
generated batches a history of their own. Those that the generator learns from are a third kind: the discriminator has
changed in between, and its step is another one. Where real and generated images stand in one batch there is one kind
only; a discriminator without BatchNorm, as many are, has nothing to convert.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import crossbn

BATCH, NOISE = 4, 16


def make_generator() -> nn.Sequential:
    """Return a network from noise to images of 8x8 pixels."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 32, 4, bias=False),
        *(nn.BatchNorm2d(32), nn.ReLU()),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


def make_discriminator() -> nn.Sequential:
    """Return a network from images to one number: how real they look."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        *(nn.BatchNorm2d(32), nn.LeakyReLU(0.2), nn.Flatten()),
        nn.Linear(128, 1),
    )


class Gan:
    """Generator and discriminator, converted, with their optimizers."""

    def __init__(self) -> None:
        self.generator, self.discriminator = make_generator(), make_discriminator()
        for network in (self.generator, self.discriminator):
            print(crossbn.convert_(network, batch_size=BATCH).summary())
        networks = self.generator, self.discriminator
        self.optimizers = [torch.optim.Adam(network.parameters(), 2e-3, betas=(0.5, 0.9)) for network in networks]

    def judge(self, images: Tensor, real: float, stream: str) -> Tensor:
        """Return the loss of taking images for real (1) or generated (0), with a history of this kind of batches."""
        with crossbn.stream(stream):
            scores = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))

    def step(self, real: Tensor) -> tuple[float, float]:
        """Train both networks once; return their losses."""
        fake = self.generator(torch.randn(BATCH, NOISE, 1, 1))
        self.optimizers[1].zero_grad()
        discriminator_loss = self.judge(real, 1.0, "real") + self.judge(fake.detach(), 0.0, "generated")
        discriminator_loss.backward()
        self.optimizers[1].step()
        self.optimizers[0].zero_grad()
        generator_loss = self.judge(fake, 1.0, "fooling")
        generator_loss.backward()
        self.optimizers[0].step()
        return discriminator_loss.item(), generator_loss.item()


def main() -> None:
    """Train on digits; print the losses and how generated images differ from real ones."""
    parser = argparse.ArgumentParser(description="A GAN at batch 4")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--toy", action="store_true", help="300 steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    images = torch.as_tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    gan = Gan()

    @torch.no_grad()
    def distance() -> float:
        generated = gan.generator.eval()(torch.randn(500, NOISE, 1, 1))
        gan.generator.train()
        return (generated.mean(0) - images.mean(0)).abs().mean().item()

    before = distance()
    for _ in range(300 if args.toy else args.steps):
        losses = gan.step(images[torch.randint(0, len(images), (BATCH,))])
    print(f"losses of discriminator and generator: {losses[0]:.2f}, {losses[1]:.2f}")
    print(f"mean image, generated less real: {before:.3f} before, {distance():.3f} after")


if __name__ == "__main__":
    main()
