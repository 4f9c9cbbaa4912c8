"""How long a training takes that nobody has done yet: a rule of thumb, mostly within a factor of three."""

import re

_SECONDS_A_LAYER = 6e-4
"""Of a step: what the calls of a layer and its norm take, forward and backward, however small the batch is."""
_FLOPS_PER_SECOND = 3e10
"""Of one core, in convolutions, norms and activations together."""
_USUAL_LAYERS = 20


def training_seconds(model: str, image_size: int, steps: float, images: float, width: int = 16) -> float:
    """Return about how long a training takes on one core.

    A layer counts as one of a residual network of CIFAR, all of whose stages take the same: 2 * 9 * width^2 FLOPs for
    each pixel of the image.

    Args:
        model: the number in its name says how many layers it has; one without, or with a version, has about 20.
        image_size: height and width.
        steps: of the training.
        images: that go forward through the network; going backward is twice as much.
        width: channels of the first stage.

    Example:
        >>> in_words(training_seconds("resnet50", 224, steps=90 * 5000, images=90 * 1.3e6 * 3))
        '4.3 years'
    """
    number = re.search(r"\d+", model)
    layers = int(number[0]) if number and int(number[0]) >= 8 else _USUAL_LAYERS
    flops = images * layers * 18 * (width * image_size) ** 2
    return steps * layers * _SECONDS_A_LAYER + flops / _FLOPS_PER_SECOND


def in_words(seconds: float) -> str:
    """Return a time as people say it.

    Example:
        >>> [in_words(each) for each in (0.2, 80, 5400, 1e6, 1e8)]
        ['1 s', '80 s', '90 min', '12 days', '3.2 years']
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    for size, unit, most in ((60, "min", 6000), (3600, "h", 72 * 3600)):
        if seconds <= most:
            return f"{seconds / size:.0f} {unit}"
    days = seconds / 86400
    return f"{days:.0f} days" if days < 730 else f"{days / 365.25:.1f} years"
