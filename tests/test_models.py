"""Whole models: every norm found, a few steps of training at batch 2, folding, export, ONNX."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.compat import ensure_torchvision
from crossbn.nn import CrossIterBatchNorm
from tests.support import history_is_finite

ensure_torchvision()
from torchvision import models  # noqa: E402  # importable only now

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # raised inside torch's exporter
]


class PreActivationNet(nn.Module):
    """A residual network that normalizes sums: bn-relu-conv blocks on a running total."""

    def __init__(self, classes: int, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norms1 = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.convs1 = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(blocks))
        self.norms2 = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.convs2 = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(blocks))
        self.last = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.stem(x)
        for norm1, conv1, norm2, conv2 in zip(self.norms1, self.convs1, self.norms2, self.convs2, strict=True):
            total = total + conv2(F.relu(norm2(conv1(F.relu(norm1(total))))))
        return self.head(F.relu(self.last(total)).mean((2, 3)))


def small_vgg(num_classes: int) -> nn.Module:
    model = models.vgg16_bn(num_classes=num_classes)
    model.classifier = nn.Linear(512 * 49, num_classes)  # the norms are elsewhere; this saves half a gigabyte
    return model


class Case(NamedTuple):
    build: Callable[..., nn.Module]
    pixels: int
    compensated: int
    left: int = 0
    learning_rate: float = 0.003


CLASSIFIERS = {
    "resnet18": Case(models.resnet18, 64, 20),
    "resnet50": Case(models.resnet50, 64, 53),
    "vgg16_bn": Case(small_vgg, 32, 13, learning_rate=0.001),
    "inception_v3": Case(lambda num_classes: models.inception_v3(num_classes=num_classes, init_weights=False), 299, 96),
    "mobilenet_v2": Case(models.mobilenet_v2, 64, 52),
    "densenet121": Case(models.densenet121, 64, 117, 4),  # the first norm of each block only sees pooled maps
    "preactivation": Case(lambda num_classes: PreActivationNet(num_classes), 32, 7, learning_rate=0.1),
}
OTHERS = {
    "resnet101": (models.resnet101, 104),
    "fasterrcnn": (partial(models.detection.fasterrcnn_resnet50_fpn_v2, weights_backbone=None), 53 + 8 + 4),
    "maskrcnn": (partial(models.detection.maskrcnn_resnet50_fpn_v2, weights_backbone=None), 53 + 8 + 4 + 4),
}
"""Of the blocks of others, which are trained."""


def train(model: nn.Module, loss_of: Callable[[], Tensor], learning_rate: float, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def onnx_outputs(program: torch.export.ExportedProgram, x: Tensor) -> list[Tensor]:
    onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    assert onnx is not None
    session = onnxruntime.InferenceSession(onnx.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(output) for output in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def paired_weight_bytes(model: nn.Module) -> int:
    norms = (module for module in model.modules() if isinstance(module, CrossIterBatchNorm))
    operators = {producer.module for norm in norms for source in norm.segments for producer in source.producers}
    return sum(operator.get_parameter("weight").nbytes for operator in operators)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg16_bn", "inception_v3", "mobilenet_v2", "densenet121"])
def test_history_is_no_larger_than_the_weights(name: str) -> None:
    """Than window - 1 times the weights of the paired operators, and half of that in bfloat16."""
    model = CLASSIFIERS[name].build(num_classes=10)
    for window, (dtype, share) in itertools.product((2, 4, 8), ((None, 1.0), (torch.bfloat16, 0.5))):
        crossbn.convert_(model, window=window, history_dtype=dtype)
        taken = sum(tensor.nbytes for tensor in crossbn.history_state(model).values())
        assert 0 < taken <= share * (window - 1) * paired_weight_bytes(model)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifier(name: str) -> None:
    case = CLASSIFIERS[name]
    torch.manual_seed(0)
    model = case.build(num_classes=10)
    report = crossbn.convert_(model, batch_size=2)
    assert (len(report.compensated), len(report.pooled), len(report.left)) == (case.compensated, 0, case.left)

    x, target = torch.randn(2, 3, case.pixels, case.pixels), torch.tensor([1, 7])

    def loss_of() -> Tensor:
        out = model(x)
        return sum(F.cross_entropy(o, target) for o in (out if isinstance(out, tuple) else (out,)))  # type: ignore[return-value]

    losses = train(model, loss_of, case.learning_rate)
    assert losses[-1] < 0.7 * losses[0]
    assert history_is_finite(model)

    folded = crossbn.fold(model)
    with torch.no_grad():
        expected = model.eval()(x)
        scale = expected.abs().max()
        assert (folded(x) - expected).abs().max() < 1e-5 * scale
        program = torch.export.export(folded, (x,))
        assert (program.module()(x) - expected).abs().max() < 1e-5 * scale
        assert (onnx_outputs(program, x)[0] - expected).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("name", OTHERS)
def test_every_norm_is_compensated(name: str) -> None:
    build, norms = OTHERS[name]
    report = crossbn.convert_(build(weights=None, num_classes=3), batch_size=2)
    assert (len(report.compensated), len(report.pooled), len(report.left)) == (norms, 0, 0)


def test_detector() -> None:
    """Mask R-CNN, which has all that Faster R-CNN has."""
    torch.manual_seed(0)
    few = {"box_batch_size_per_image": 16, "rpn_post_nms_top_n_train": 50, "rpn_post_nms_top_n_test": 20}
    build = models.detection.maskrcnn_resnet50_fpn_v2
    model = build(weights=None, weights_backbone=None, num_classes=3, min_size=96, max_size=128, **few)
    crossbn.convert_(model, batch_size=2)
    images = [torch.rand(3, 96, 128), torch.rand(3, 110, 90)]
    target = {
        "boxes": torch.tensor([[10.0, 12.0, 60.0, 70.0], [30.0, 5.0, 80.0, 50.0]]),
        "labels": torch.tensor([1, 2]),
        "masks": torch.zeros(2, 128, 128, dtype=torch.uint8),
    }
    target["masks"][:, 12:50, 30:60] = 1

    def loss_of() -> Tensor:
        torch.manual_seed(1)  # the same sampled proposals, so that the losses compare
        return sum(model(images, [target, target]).values())

    # Proposals change with the weights, so the fall is not monotonous; and with rounding, so nothing less will do.
    losses = train(model, loss_of, 0.002, steps=9)
    assert min(losses[1:]) < 0.9 * losses[0]
    assert history_is_finite(model)
    folded = crossbn.fold(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    parts: list[tuple[str, Tensor]] = [
        ("backbone", torch.rand(2, 3, 96, 128)),
        ("roi_heads.box_head", torch.rand(5, 256, 7, 7)),
        ("roi_heads.mask_head", torch.rand(3, 256, 14, 14)),
    ]
    with torch.no_grad():
        model.eval()
        exact = copy.deepcopy(model).double()  # in float32 the roundings of 50 layers add up
        folded_exactly = crossbn.fold(exact)
        for part, x in parts:
            expected, got = exact.get_submodule(part)(x.double()), folded_exactly.get_submodule(part)(x.double())
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(folded(images), model(images), strict=True):  # boxes of equal scores may swap
            torch.testing.assert_close(ours["scores"], theirs["scores"], rtol=1e-4, atol=1e-5)
        # Of a detector the backbone can be exported; what follows depends on the data.
        x = parts[0][1]
        program = torch.export.export(folded.get_submodule("backbone"), (x,))
        features = list(model.get_submodule("backbone")(x).values())
        for got in (list(program.module()(x).values()), onnx_outputs(program, x)):
            torch.testing.assert_close(got, features, rtol=1e-4, atol=1e-4)
