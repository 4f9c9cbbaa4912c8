import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crossbn import compat
from tests.support import draw, run_python

# The operators are called directly as well as through torchvision, so that they are tested on machines where
# torchvision's compiled ones load.


@pytest.fixture(scope="module")
def ops() -> Any:
    compat.ensure_torchvision()
    return importlib.import_module("torchvision.ops")


def best_seconds(function: Callable[[], object], repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def reference_nms(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Greedy, one pair at a time; the overlap is rounded to the boxes' dtype, the threshold is not."""
    corners, values = boxes.tolist(), scores.tolist()
    kept: list[int] = []
    for candidate in sorted(range(len(values)), key=lambda i: -values[i]):
        left, top, right, bottom = corners[candidate]
        for other in kept:
            other_left, other_top, other_right, other_bottom = corners[other]
            width = max(0.0, min(right, other_right) - max(left, other_left))
            height = max(0.0, min(bottom, other_bottom) - max(top, other_top))
            area = (right - left) * (bottom - top)
            other_area = (other_right - other_left) * (other_bottom - other_top)
            union = area + other_area - width * height
            if union and torch.tensor(width * height / union, dtype=boxes.dtype).item() > threshold:
                break
        else:
            kept.append(candidate)
    return kept


def random_boxes(count: int, *, grid: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Few different whole numbers, for overlaps on the threshold, duplicates and equal scores."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, grid, (count, 2), generator=generator)
    size = torch.randint(0, grid // 2, (count, 2), generator=generator)
    scores = torch.randint(0, count // 3 + 1, (count,), generator=generator)
    return torch.cat([corner, corner + size], dim=1).to(dtype), scores.to(dtype) / 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize(("count", "grid", "block"), [(1, 6, 128), (70, 6, 128), (70, 12, 8), (71, 30, 1)])
def test_nms_equals_brute_force(
    monkeypatch: pytest.MonkeyPatch, count: int, grid: int, block: int, threshold: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(compat, "_NMS_BLOCK", block)
    for seed in range(3):
        boxes, scores = random_boxes(count, grid=grid, seed=seed, dtype=dtype)
        assert compat._nms(boxes, scores, threshold).tolist() == reference_nms(boxes, scores, threshold)


def test_nms_keeps_the_first_of_equals() -> None:
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0]]).repeat(3, 1)
    assert compat._nms(boxes, torch.ones(6), 0.5).tolist() == [0, 1]
    assert compat._nms(boxes, torch.tensor([0.1, 0.2, 0.3, 0.2, 0.3, 0.1]), 0.5).tolist() == [2, 1]


def test_nms_overlap_on_the_threshold() -> None:
    boxes = torch.tensor([[0.0, 0.0, 13.0, 1.0], [7.0, 0.0, 20.0, 1.0]])
    scores = torch.tensor([1.0, 0.5])
    # 6 / 20 rounds to a float32 above the double 0.3; in float64 the two are the same number.
    assert compat._nms(boxes, scores, 0.3).tolist() == [0]
    assert compat._nms(boxes.double(), scores.double(), 0.3).tolist() == [0, 1]


def test_nms_of_a_chain_keeps_every_other_box() -> None:
    left = torch.arange(1200.0)
    boxes = torch.stack([left, torch.zeros(1200), left + 2, torch.ones(1200)], dim=1)
    assert compat._nms(boxes, -left, 0.3).tolist() == list(range(0, 1200, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nms_of_nothing(dtype: torch.dtype) -> None:
    kept = compat._nms(torch.empty(0, 4, dtype=dtype), torch.empty(0, dtype=dtype), 0.5)
    assert kept.dtype == torch.int64
    assert kept.tolist() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_nms_of_narrow_dtypes_overlaps_in_single_precision(dtype: torch.dtype) -> None:
    boxes, scores = random_boxes(60, grid=100, seed=3, dtype=torch.float32)
    scores = (scores * 7).to(dtype)
    kept = compat._nms(boxes.to(dtype), scores, 0.4).tolist()
    assert kept == reference_nms(boxes, scores, 0.4)
    assert len(kept) < 60


@pytest.mark.parametrize(("boxes", "scores"), [((3, 5), (3,)), ((3, 4), (2,)), ((4,), (4,))])
def test_nms_names_wrong_shapes(boxes: tuple[int, ...], scores: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"boxes \[N, 4\]"):
        compat._nms(torch.zeros(boxes), torch.zeros(scores), 0.5)


@pytest.mark.parametrize("count", [90, 1100])
def test_batched_nms_is_nms_in_each_class(ops: Any, count: int) -> None:
    boxes, _ = random_boxes(count, grid=40, seed=5, dtype=torch.float32)
    scores = torch.randperm(count, generator=torch.Generator().manual_seed(6)) / count
    classes = torch.arange(count) % 3
    expected = []
    for label in range(3):
        members = (classes == label).nonzero()[:, 0]
        expected += members[reference_nms(boxes[members], scores[members], 0.4)].tolist()
    expected.sort(key=lambda i: -scores[i].item())
    assert ops.batched_nms(boxes, scores, classes, 0.4).tolist() == expected


def test_nms_is_fast() -> None:
    generator = torch.Generator().manual_seed(0)
    corner, size = torch.rand(2, 2000, 2, generator=generator) * torch.tensor([[[800.0]], [[100.0]]])
    boxes, scores = torch.cat([corner, corner + size], dim=1), torch.rand(2000, generator=generator)
    assert best_seconds(lambda: compat._nms(boxes, scores, 0.7)) < 1


def reference_roi_align(
    features: Tensor, rois: Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> Tensor:
    """One sample at a time, differentiable in the features."""
    map_height, map_width = features.shape[2:]

    def sample(image: Tensor, y: float, x: float) -> Tensor:
        if y < -1 or y > map_height or x < -1 or x > map_width:
            return torch.zeros_like(image[:, 0, 0])
        y, x = min(max(y, 0.0), map_height - 1), min(max(x, 0.0), map_width - 1)
        top, left = math.floor(y), math.floor(x)
        bottom, right = min(top + 1, map_height - 1), min(left + 1, map_width - 1)
        upper = image[:, top, left] * (left + 1 - x) + image[:, top, right] * (x - left)
        lower = image[:, bottom, left] * (left + 1 - x) + image[:, bottom, right] * (x - left)
        return upper * (top + 1 - y) + lower * (y - top)

    output = []
    for index, *corners in rois.tolist():
        x1, y1, x2, y2 = (corner * scale - (0.5 if aligned else 0) for corner in corners)
        roi_height, roi_width = y2 - y1, x2 - x1
        if not aligned:
            roi_height, roi_width = max(roi_height, 1.0), max(roi_width, 1.0)
        rows = ratio if ratio > 0 else math.ceil(roi_height / height)
        columns = ratio if ratio > 0 else math.ceil(roi_width / width)
        for i, j in itertools.product(range(height), range(width)):
            total = torch.zeros_like(features[0, :, 0, 0])
            for k, m in itertools.product(range(rows), range(columns)):
                y = y1 + (i + (k + 0.5) / rows) * roi_height / height
                x = x1 + (j + (m + 0.5) / columns) * roi_width / width
                total = total + sample(features[int(index)], y, x)
            output.append(total / max(rows * columns, 1))
    stacked = torch.stack(output) if output else features.sum((0, 2, 3)).expand(0, -1)
    return stacked.reshape(len(rois), height, width, -1).permute(0, 3, 1, 2)


# On a map of 7 x 9: inside it, over each border, all of it, larger, off it, thin, a point, inside out.
ROIS = [
    [0, 1.2, 0.7, 6.3, 5.9],
    [1, -2.4, 1.1, 3.6, 4.2],
    [0, 5.5, -3.3, 11.8, 2.9],
    [1, 2.1, 4.4, 6.6, 9.7],
    [0, 0.0, 0.0, 9.0, 7.0],
    [1, -4.7, -5.2, 13.9, 12.3],
    [0, 20.3, 1.0, 25.1, 4.0],
    [1, 3.1, 1.3, 3.4, 6.2],
    [0, 4.25, 3.25, 4.25, 3.25],
    [1, 6.2, 5.1, 2.3, 1.4],
]


def roi_case(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    features = draw(1, 2, 3, 7, 9, dtype=torch.float64)
    rois = torch.tensor(ROIS, dtype=torch.float64)
    rois[:, 1:] /= scale
    return features.to(dtype), rois.to(dtype)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("ratio", [1, 2, 3, 0, -1])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("size", [(2, 3), (1, 1)])
def test_roi_align_and_gradient_equal_loops(size: tuple[int, int], aligned: bool, ratio: int, scale: float) -> None:
    features, rois = roi_case(scale)
    features.requires_grad_()
    expected = reference_roi_align(features, rois, scale, *size, ratio, aligned)
    pooled = compat._roi_align(features, rois, scale, *size, ratio, aligned)
    torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=1e-12)
    cotangent = draw(2, *pooled.shape, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad(expected, features, cotangent)
    (grad,) = torch.autograd.grad(pooled, features, cotangent)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("ratio", [2, -1])
def test_roi_align_gradcheck(ratio: int) -> None:
    features, rois = roi_case()
    features.requires_grad_()
    assert torch.autograd.gradcheck(lambda f: compat._roi_align(f, rois, 1.0, 2, 2, ratio, True), features)


def test_roi_align_at_the_edge_of_validity() -> None:
    features = torch.arange(1.0, 13.0).reshape(1, 1, 3, 4)
    # One sample at each box's centre: one pixel off a corner it still reads the corner, further off zero.
    centres = [(-1.0, -1.0), (4.0, 3.0), (-1.0, -1.001), (4.001, 3.0), (1.5, 1.0)]
    rois = torch.tensor([[0, x - 1, y - 1, x + 1, y + 1] for x, y in centres])
    pooled = compat._roi_align(features, rois, 1.0, 1, 1, 1, False)
    assert pooled.flatten().tolist() == [1.0, 12.0, 0.0, 0.0, 6.5]


@pytest.mark.parametrize("ratio", [2, -1])
def test_roi_align_of_no_boxes_has_a_zero_gradient(ops: Any, ratio: int) -> None:
    features = roi_case(dtype=torch.float32)[0].requires_grad_()
    pooled = ops.roi_align(features, [torch.empty(0, 4), torch.empty(0, 4)], (2, 3), sampling_ratio=ratio)
    assert pooled.shape == (0, 3, 2, 3)
    (grad,) = torch.autograd.grad(pooled.sum(), features)
    assert torch.equal(grad, torch.zeros_like(features))


@pytest.mark.parametrize("ratio", [2, -1])
def test_roi_align_through_torchvision(ops: Any, ratio: int) -> None:
    features, rois = roi_case(0.5, torch.float32)
    by_image = [rois[rois[:, 0] == image, 1:] for image in range(2)]
    order = rois[:, 0].argsort(stable=True)
    expected = reference_roi_align(features, rois[order], 0.5, 3, 3, ratio, True)
    with torch.no_grad():
        pooled = ops.roi_align(features, by_image, 3, spatial_scale=0.5, sampling_ratio=ratio, aligned=True)
    torch.testing.assert_close(pooled, expected)


@pytest.mark.parametrize(
    ("features_dtype", "rois_dtype", "tolerance"),
    [
        (torch.float64, torch.float32, 1e-5),
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.float64, 1e-5),
        (torch.bfloat16, torch.float32, 2e-2),
        (torch.float16, torch.float32, 2e-3),
    ],
)
def test_roi_align_of_mixed_dtypes(features_dtype: torch.dtype, rois_dtype: torch.dtype, tolerance: float) -> None:
    features, rois = roi_case()
    features = features.to(features_dtype)
    expected = reference_roi_align(features.double(), rois, 1.0, 2, 2, 2, False)
    pooled = compat._roi_align(features, rois.to(rois_dtype), 1.0, 2, 2, 2, False)
    assert pooled.dtype == features_dtype
    torch.testing.assert_close(pooled.double(), expected, rtol=tolerance, atol=tolerance)


def test_multiscale_roi_align_under_autocast(ops: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    maps = {name: torch.randn(1, 3, size, size, generator=generator) for name, size in (("0", 32), ("1", 16))}
    leaves = {name: values.bfloat16().requires_grad_() for name, values in maps.items()}
    # One box for each map: the pooler takes the coarser one from a side of 224 on.
    boxes = torch.tensor([[3.3, 5.1, 40.7, 37.9], [10.4, 1.3, 251.2, 243.8]])
    pooler = ops.MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = pooler(leaves, [boxes], [(256, 256)])
    assert pooled.dtype == torch.bfloat16
    rois = torch.cat([torch.zeros(2, 1), boxes], dim=1)
    fine, coarse = (leaves[name].detach().double() for name in ("0", "1"))
    expected = torch.cat(
        [
            reference_roi_align(fine, rois[:1], 1 / 8, 3, 3, 2, False),
            reference_roi_align(coarse, rois[1:], 1 / 16, 3, 3, 2, False),
        ]
    )
    # The only rounding to bfloat16 is that of the result.
    torch.testing.assert_close(pooled.double(), expected, rtol=2**-8, atol=1e-5)
    pooled.sum().backward()
    for leaf in leaves.values():
        assert leaf.grad is not None
        # Interpolation weights sum to one in each of the 3 x 3 bins.
        assert leaf.grad.double().sum().item() == pytest.approx(3 * 9, rel=2e-2)


def test_roi_align_is_fast() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 256, 50, 50, generator=generator, requires_grad=True)
    corner, size = torch.rand(2, 512, 2, generator=generator) * 25
    rois = torch.cat([torch.zeros(512, 1), corner, corner + size], dim=1)
    pooled = compat._roi_align(features, rois, 1.0, 7, 7, 2, False)
    assert best_seconds(lambda: compat._roi_align(features, rois, 1.0, 7, 7, 2, False)) < 1
    assert best_seconds(lambda: torch.autograd.grad(pooled, features, pooled, retain_graph=True)) < 1


def test_detector_trains_and_evaluates() -> None:
    """Also after an import of torchvision that failed, and with repeated calls."""
    printed = run_python(
        "-W",
        "error",
        "-c",
        """
import contextlib
import sys
with contextlib.suppress(RuntimeError):
    import torchvision
from crossbn.compat import ensure_torchvision
ensure_torchvision()
ensure_torchvision()
import torch
import torchvision
for parent, _, child in (name.rpartition(".") for name in list(sys.modules)):
    assert not parent.startswith("torchvision") or hasattr(sys.modules[parent], child), child
torch.manual_seed(0)
model = torchvision.models.detection.fasterrcnn_resnet50_fpn(
    weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64, box_score_thresh=0.0
)
target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 48.0]]), "labels": torch.tensor([1])}
losses = model([torch.rand(3, 64, 64)], [target])
sum(losses.values()).backward()
assert sorted(losses) == ["loss_box_reg", "loss_classifier", "loss_objectness", "loss_rpn_box_reg"]
grad = model.backbone.body.conv1.weight.grad
assert grad.isfinite().all() and grad.abs().sum() > 0
with torch.no_grad():
    (found,) = model.eval()([torch.rand(3, 64, 64)])
assert all(values.isfinite().all() for values in found.values())
print(len(found["scores"]), bool((found["scores"].diff() <= 0).all()))
""",
    )
    count, descending = printed.split()
    assert int(count) > 0
    assert descending == "True"


def test_unreplaced_operators_fail_clearly(ops: Any) -> None:
    if not compat._operators_replaced(tuple(sys.modules["torchvision"].__path__)):
        pytest.skip("torchvision's compiled operators load here")
    features, rois = roi_case(dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"Couldn't load custom C\+\+ ops"):
        ops.roi_pool(features, rois, 2)
    with pytest.raises(RuntimeError, match=r"Couldn't load custom C\+\+ ops"):
        ops.ps_roi_align(features, rois, 1)
    with pytest.raises(RuntimeError, match=r"Couldn't load custom C\+\+ ops"):
        ops.deform_conv2d(features, torch.zeros(2, 18, 5, 7), torch.zeros(3, 3, 3, 3))


def test_nothing_happens_where_the_operators_load() -> None:
    printed = run_python(
        "-W",
        "error",
        "-c",
        """
import sys
import torch
from crossbn import compat
assert not any(name.split(".")[0] == "torchvision" for name in sys.modules)

def load_library(path):
    print(path)
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

torch.ops.load_library = load_library
compat.ensure_torchvision()
compat.ensure_torchvision()
assert not any(name.split(".")[0] == "torchvision" for name in sys.modules)
assert not hasattr(torch.ops.torchvision, "qnms") and not hasattr(torch.ops.torchvision, "roi_align")
""",
    )
    (path,) = printed.splitlines()
    assert "_C" in path


def test_missing_torchvision_is_one_sentence() -> None:
    printed = run_python(
        "-W",
        "error",
        "-c",
        """
import sys
sys.modules["torchvision"] = None
from crossbn.compat import ensure_torchvision
try:
    ensure_torchvision()
except ImportError as error:
    print(error)
""",
    )
    assert printed == "torchvision is not installed: run `pip install torchvision`.\n"
