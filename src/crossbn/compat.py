"""Make `import torchvision` work where its compiled operators cannot load.

A torchvision wheel built for CUDA beside a CPU build of torch fails at import, because it describes operators
that its library should have defined. `ensure_torchvision` defines those that detection models need (`nms`,
`qnms`, `roi_align`) out of plain torch operations, which run on every device and floating dtype.
"""

import functools
import importlib.machinery
import importlib.util
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ensure_torchvision"]

# How many boxes nms compares with all others at once: bounds its memory and keeps its Python loop short.
# From 256 on, torch would split the small operations between threads, which costs more than it gains.
_NMS_BLOCK = 128


def ensure_torchvision() -> None:
    """Make torchvision importable, its detection models included.

    Does nothing where torchvision's compiled operators load. Elsewhere it defines `nms` and `roi_align`, then
    imports torchvision. Operators without a replacement, such as `roi_pool`, raise torchvision's own error.

    Raises:
        ImportError: torchvision is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        raise ImportError("torchvision is not installed: run `pip install torchvision`.", name="torchvision")
    if not _operators_replaced(tuple(spec.submodule_search_locations or ())):
        return
    if "torchvision" not in sys.modules:
        # An import that failed earlier left submodules behind that a new import would not tie to the package.
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
    importlib.import_module("torchvision")
    # At import torchvision concluded that it has no operators: it would refuse nms and compile a roi_align of
    # its own. Only these two modules are told otherwise, so that what is missing still fails with its error.
    for name in ("torchvision.ops.boxes", "torchvision.ops.roi_align"):
        vars(sys.modules[name]).update(_has_ops=_has_ops, _assert_has_ops=_has_ops)


def _has_ops() -> bool:
    return True


@functools.cache
def _operators_replaced(package: tuple[str, ...]) -> bool:
    """Define the operators unless torchvision, in the folders `package`, has them; decided once a process."""
    if _operators_exist(package):
        return False
    # nms must not be CompositeImplicitAutograd: torchvision adds a shape function, which that key rules out.
    # roi_align must be: its gradient is that of the torch operations inside.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.impl(f"torchvision::{name}", "CompositeExplicitAutograd", _nms)
    torch.library.define(
        "torchvision::roi_align",
        "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor",
    )
    torch.library.impl("torchvision::roi_align", "CompositeImplicitAutograd", _roi_align)
    return True


def _operators_exist(package: tuple[str, ...]) -> bool:
    """Whether `torchvision::nms` is defined, if need be after loading the library that should define it."""
    if not hasattr(torch.ops.torchvision, "nms"):
        extension = importlib.machinery.PathFinder.find_spec("_C", package)
        if extension is None or extension.origin is None:
            return False
        try:
            torch.ops.load_library(extension.origin)
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")


def _nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes [N, 4] that no kept box of higher score overlaps, by descending score."""
    if dets.dim() != 2 or dets.shape[1] != 4 or scores.shape != dets.shape[:1]:
        raise ValueError(f"nms takes boxes [N, 4] and scores [N], got {[*dets.shape]} and {[*scores.shape]}")
    boxes = dets.to(torch.promote_types(dets.dtype, torch.float32))
    # torchvision compares float32 overlaps with a double threshold, so that an overlap of 3/10 exceeds 0.3.
    # Comparing with the largest number of the boxes' dtype not above the threshold does the same.
    limit = torch.tensor(iou_threshold, dtype=boxes.dtype)
    threshold = (limit if limit.item() <= iou_threshold else limit.nextafter(limit - 1)).item()
    candidates = scores.argsort(descending=True, stable=True)
    kept = [candidates[:0]]
    while len(candidates):
        head = candidates[:_NMS_BLOCK]
        overlaps = _box_iou(boxes[head], boxes[candidates]) > threshold
        keep = _greedy_choice(overlaps[:, : len(head)])
        kept.append(head[keep])
        alive = ~overlaps[keep].any(dim=0)
        candidates = candidates[len(head) :][alive[len(head) :]]
    return torch.cat(kept)


def _box_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of every box [M, 4] with every other [N, 4]."""
    low = torch.maximum(boxes[:, None, :2], others[:, :2])
    high = torch.minimum(boxes[:, None, 2:], others[:, 2:])
    intersection = (high - low).clamp(min=0).prod(dim=2)
    area, other_area = ((group[:, 2:] - group[:, :2]).prod(dim=1) for group in (boxes, others))
    return intersection / (area[:, None] + other_area - intersection)


def _greedy_choice(overlaps: Tensor) -> Tensor:
    """Which of B boxes, best first, are kept: those that overlap no earlier kept one.

    Iterates that sentence as an equation, whose one solution is the greedy choice. Round t settles at least
    the first t boxes; a handful of rounds is usual.
    """
    earlier = overlaps.triu(diagonal=1)
    keep = torch.ones_like(overlaps[0])
    while True:
        settled = ~(earlier & keep[:, None]).any(dim=0)
        if torch.equal(settled, keep):
            return keep
        keep = settled


def _roi_align(
    features: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Average the bilinear samples in every bin of every box [K, 5] into [K, C, pooled_height, pooled_width].

    A bin is a weighted sum of pixels, rows of C values: `embedding_bag` takes it without storing the samples.
    Half precision cannot place a sample, so everything is at least in single precision until the end.
    """
    dtype = torch.promote_types(torch.promote_types(features.dtype, rois.dtype), torch.float32)
    _, channels, height, width = features.shape
    # As in torchvision, boxes get no gradient.
    corners = rois[:, 1:].detach().to(dtype) * spatial_scale - (0.5 if aligned else 0.0)
    start, size = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if not aligned:
        size = size.clamp(min=1)
    x_taps, x_pixel, x_weight = _axis_taps(start[:, 0], size[:, 0], pooled_width, sampling_ratio, width)
    y_taps, y_pixel, y_weight = _axis_taps(start[:, 1], size[:, 1], pooled_height, sampling_ratio, height)

    # Boxes differ in samples per bin, so the pixels of all bins form one flat list: `cell` is the bin that an
    # entry belongs to and `tap` its place there, both row-major.
    cells = pooled_height * pooled_width
    counts = (y_taps * x_taps).repeat_interleave(cells)
    offsets = counts.cumsum(0) - counts
    cell = torch.arange(len(counts), device=rois.device).repeat_interleave(counts)
    tap = torch.arange(len(cell), device=rois.device) - offsets[cell]
    box = cell // cells
    y = box, cell // pooled_width % pooled_height, tap // x_taps[box]
    x = box, cell % pooled_width, tap % x_taps[box]
    pixel = (rois[:, 0].long()[box] * height + y_pixel[y]) * width + x_pixel[x]

    rows = features.permute(0, 2, 3, 1).reshape(-1, channels).to(dtype)
    pooled = F.embedding_bag(pixel, rows, offsets, mode="sum", per_sample_weights=y_weight[y] * x_weight[x])
    pooled = pooled.to(features.dtype).reshape(len(rois), pooled_height, pooled_width, channels)
    return pooled.permute(0, 3, 1, 2).contiguous()


def _axis_taps(
    start: Tensor, size: Tensor, bins: int, sampling_ratio: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels read along one axis: how many per bin [K], which ones and their weights [K, bins, most].

    A sample reads two neighbours. Columns beyond a box's own count are padding and hold no meaningful values.
    """
    bin_size = size / bins
    grid = torch.full_like(size, sampling_ratio) if sampling_ratio > 0 else bin_size.ceil().clamp(min=0)
    taps = 2 * grid.long()
    start, bin_size, grid = (values[:, None, None] for values in (start, bin_size, grid))
    bin_index = torch.arange(bins, device=size.device)[:, None]
    sample = torch.arange(int(grid.max()) if len(grid) else 0, device=size.device, dtype=size.dtype)
    position = start + bin_index * bin_size + (sample + 0.5) * bin_size / grid
    # Samples further than a pixel off the map count as zero, nearer ones take the value at its border.
    inside = (position >= -1) & (position <= length)
    position = position.clamp(0, length - 1)
    low = position.floor()
    pixel = torch.stack([low, (low + 1).clamp(max=length - 1)], dim=-1).long()
    weight = torch.stack([low + 1 - position, position - low], dim=-1) * (inside / grid)[..., None]
    return taps, pixel.flatten(2), weight.flatten(2)
