"""The figures of derivation.md: `python docs/figures.py` draws them into this directory, in one or two minutes.

It needs what `pip install '.[demo]'` installs. A small network learns the demo's digits at batch size 2; its maps stay
large enough for BN to work at that batch size, so that what differs is the gradient and not a breakdown of BN.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from crossbn import convert_
from crossbn import functional as C
from crossbn.lab.experiments.pictures import load_digits
from crossbn.lab.report.figure import COLOURS

HERE = Path(__file__).parent
BATCH_SIZE, WINDOW, MOMENTUM, IMAGES = 2, 8, 0.9, 500
LEARNING_RATES = (0.002, 0.01, 0.03)  # the first one for the curves
STEPS, LAST_STEPS, SMOOTHED = 1000, 250, 20
BACKWARDS = {"BN": None, 'CBN, "through"': "through", 'CBN, "detached"': "detached"}
STYLES = ((COLOURS[4], ":"), (COLOURS[1], "-"), (COLOURS[0], "--"))


def make_network(backward: str | None) -> nn.Sequential:
    """Return the network with the same weights at every call: with BN for None, else with CBN and that backward."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for in_channels, channels, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1)):
        conv = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    if backward is not None:
        convert_(model, window=WINDOW, backward=backward)
    return model


def train(model: nn.Module, learning_rate: float) -> Iterator[float]:
    """Train a step for each loss that is asked for, with the same batches at every call."""
    pixels, digits = (each[:IMAGES] for each in load_digits(train=True))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, MOMENTUM)
    generator = torch.Generator().manual_seed(1)
    while True:
        for batch in torch.randperm(IMAGES, generator=generator).split(BATCH_SIZE):
            loss = F.cross_entropy(model(pixels[batch]), digits[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


class Variances(NamedTuple):
    """Variances [T, C] of a remembered batch while one layer's weights move away."""

    change: Tensor
    """[T]: of the weights, relative to their norm."""
    true: Tensor
    orders: tuple[Tensor, Tensor, Tensor]


def remember_and_train(warm_up: int = 100, further: int = 64) -> tuple[nn.Conv2d, Tensor, Tensor, Tensor, float]:
    """Train, remember what the last convolution read at one step, and train on.

    Returns:
        The convolution, its input and its weights at that step, the way that they have gone since, as long as
        the weights themselves, and how far they were at the end of a window.
    """
    model = make_network(None)
    conv = model[6]
    assert isinstance(conv, nn.Conv2d)
    steps, inputs = train(model, LEARNING_RATES[0]), []
    list(islice(steps, warm_up))
    old = conv.weight.detach().double().flatten(1)
    with conv.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().double())):
        next(steps)
    list(islice(steps, WINDOW - 2))
    within_window = float((conv.weight.detach().flatten(1) - old).norm() / old.norm())
    list(islice(steps, further))
    way = conv.weight.detach().flatten(1) - old
    return conv, inputs[0], old, way * old.norm() / way.norm(), within_window


@torch.no_grad()
def follow(conv: nn.Conv2d, y: Tensor, old: Tensor, way: Tensor, change: Tensor) -> Variances:
    """Move the weights along `way` and return the batch's variances, true and by the polynomials."""
    geometry = C.geometry_of(conv)

    def output(weight: Tensor) -> Tensor:
        return F.conv2d(y, C.unflatten_weight(weight, geometry), None, conv.stride, conv.padding)

    x = output(old)
    mean, var = C.batch_moments(x)
    mean_grad, var_grad = C.mean_grad(y, geometry, x.shape[2:]), C.var_grad(x, mean, y, old, geometry)
    true, first, second = [], [], []
    for moved in change.reshape(-1, 1, 1) * way:
        drift = C.project(mean_grad.unsqueeze(0), moved)[0], C.project(var_grad.unsqueeze(0), moved)[0]
        true.append(C.batch_moments(output(old + moved))[1])
        first.append(C.compensate(mean, var, C.TaylorTerms(*drift))[1])
        second.append(C.compensate(mean, var, C.TaylorTerms(*drift, output(moved).square().mean([0, 2, 3])))[1])
    return Variances(change, torch.stack(true), (var.expand(len(true), -1), torch.stack(first), torch.stack(second)))


def draw_taylor() -> Figure:
    """Draw one channel's variance, and the error of all channels, against the change of the weights."""
    conv, y, old, way, within_window = remember_and_train()
    even = follow(conv, y, old, way, torch.linspace(0, 0.3, 51, dtype=torch.float64))
    near = follow(conv, y, old, way, torch.logspace(-3, 0, 31, dtype=torch.float64))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    slope = (even.true[1] / even.true[0] - 1).abs()
    channel = int(slope.argsort()[len(slope) // 2])  # a typical one
    left.plot(even.change, even.true[:, channel], color="#bbbbbb", linewidth=6, label="true")
    for order, (colour, line) in enumerate((STYLES[2], STYLES[1], STYLES[0])):
        style = {"color": colour, "linestyle": line, "label": f"order {order}"}
        left.plot(even.change, even.orders[order][:, channel], linewidth=2, **style)
        if order < 2:
            error = (near.orders[order] - near.true).abs() / near.true
            right.loglog(near.change, 100 * error.median(1).values, linewidth=2, **style)
    right.axvline(within_window, color="#777777", linewidth=1)
    note = f" {WINDOW - 1} steps of\n this training"
    right.annotate(note, (within_window, 1), xycoords=("data", "axes fraction"), fontsize=8, verticalalignment="top")
    finish(left, "Variance of a remembered batch, one channel", "Change of the weights, relative to their norm")
    finish(right, "Error, % of the true variance, median of channels", "Change of the weights, relative to their norm")
    left.legend(frameon=False)
    right.legend(frameon=False, loc="lower right")
    return figure


def watch(backward: str | None, learning_rate: float) -> tuple[list[float], list[float], list[float]]:
    """Train; return at each step |cosine| of weight gradient and weight, growth of the weights' norm, and the loss.

    The cosine is that of one channel, averaged over all channels; the growth is averaged over the layers.
    """
    model = make_network(backward)
    weights = [module.weight for module in model if isinstance(module, nn.Conv2d)]
    start = [weight.detach().norm() for weight in weights]
    cosines, growth, losses = [], [], []
    before = [weight.detach().flatten(1).clone() for weight in weights]
    for loss in islice(train(model, learning_rate), STEPS):
        grads = [weight.grad.flatten(1) for weight in weights if weight.grad is not None]
        angles = [F.cosine_similarity(g, w, eps=1e-20).abs() for g, w in zip(grads, before, strict=True)]
        before = [weight.detach().flatten(1).clone() for weight in weights]
        cosines.append(float(torch.cat(angles).mean()))
        growth.append(float(sum(w.norm() / norm for w, norm in zip(before, start, strict=True)) / len(start)))
        losses.append(loss)
    return cosines, growth, losses


def draw_weight_scale() -> Figure:
    """Draw what the weights' scale does in training under BN, and under CBN with either backward."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for (label, backward), (colour, line) in zip(BACKWARDS.items(), STYLES, strict=True):
        style = {"color": colour, "linestyle": line, "label": label, "linewidth": 2}
        trials = [watch(backward, rate) for rate in LEARNING_RATES]
        cosines, growth, _ = trials[0]
        at = range(SMOOTHED // 2, STEPS, SMOOTHED)
        panels[0].plot(at, torch.tensor(cosines).unflatten(0, (-1, SMOOTHED)).mean(1), **style)
        panels[1].plot(at, growth[SMOOTHED // 2 :: SMOOTHED], **style)
        finals = [sum(losses[-LAST_STEPS:]) / LAST_STEPS for *_, losses in trials]
        panels[2].semilogx(LEARNING_RATES, finals, marker="o", **style)
        print(
            f"{label}: cosine {sum(cosines) / STEPS:.4f}, norm {growth[-1]:.3f}, losses", *(f"{f:.3f}" for f in finals)
        )
    finish(panels[0], "|Cosine| of weight gradient and weight", "Training step")
    finish(panels[1], "Norm of the weights, relative", "Training step")
    finish(panels[2], f"Training loss, last {LAST_STEPS} of {STEPS} steps", "Learning rate")
    panels[2].set_xticks(LEARNING_RATES, [str(rate) for rate in LEARNING_RATES])
    panels[2].minorticks_off()
    panels[2].set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def finish(axes: Axes, title: str, label: str) -> None:
    """Give a panel its title and a plain frame."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw the figures."""
    torch.set_num_threads(1)  # sums in the same order on every machine
    matplotlib.rcParams["svg.hashsalt"] = "crossbn"
    for name, draw in (("taylor", draw_taylor), ("weight-scale", draw_weight_scale)):
        figure = draw()
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
