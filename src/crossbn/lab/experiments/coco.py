"""The paper's tables and figures of detection, a specification each."""

from typing import Any

from crossbn.lab.experiments import coco_paper
from crossbn.lab.experiments.detection import TITLES, DetectionCell, settings_of
from crossbn.lab.experiments.detection_table import Cells, DetectionTable
from crossbn.lab.experiments.experiment import Scale
from crossbn.schedules import window_for

_TITLES = {**TITLES, "none": "none"}


def _cell(norm: str, scale: Scale, where: str = "heads", **more: Any) -> DetectionCell:
    """Return a cell with the paper's window; of its changes only those that are some."""
    shared = settings_of(scale)
    window = window_for(shared["batch_size"]) if norm == "cbn" else None
    changes = {name: value for name, value in more.pop("changes", {}).items() if shared[name] != value}
    return DetectionCell(norm, where, window, changes=changes, **more)


def _norm_cells(scale: Scale) -> Cells:
    joint = ("sync_bn",) if scale is Scale.FULL else ()  # a single process has nothing to synchronize with
    heads = ("none", "bn", *joint, "gn", "brn", "cbn")
    everywhere = ("bn", *joint, *(("gn",) if scale is Scale.FULL else ()), "cbn")
    cells = {f"fixed BN, {_TITLES[norm]}": _cell(norm, scale) for norm in heads}
    return {**cells, **{f"{_TITLES[norm]}, {_TITLES[norm]}": _cell(norm, scale, "all") for norm in everywhere}}


def _backbone_cells(scale: Scale) -> Cells:
    models = {"Faster R-CNN": "faster_rcnn", "Mask R-CNN": "mask_rcnn"}
    backbones = {"ResNet-50": "resnet50", "ResNet-101": "resnet101"}
    norms = ("gn", "sync_bn", "cbn")
    if scale is Scale.SMALL:
        backbones, norms = {"EfficientNet-Lite0": "efficientnet_lite0"}, ("gn", "bn", "cbn")
    return {
        f"{model}, {backbone}, {_TITLES[norm]}": _cell(
            norm, scale, changes={"model": models[model], "backbone": backbones[backbone]}
        )
        for model in models
        for backbone in backbones
        for norm in norms
    }


def _window_cells(scale: Scale) -> Cells:
    del scale
    places = {"heads": "heads", "everywhere": "all"}
    return {
        f"{place}, k = {window}": DetectionCell("bn", where) if window == 1 else DetectionCell("cbn", where, window)
        for place, where in places.items()
        for window in (1, 2, 4, 8, 16)
    }


def _burn_in_cells(scale: Scale) -> Cells:
    return {f"burn-in {share:.0%}": _cell("cbn", scale, burn_in=share) for share in (0.0, 0.1, 0.25, 0.5, 0.75)}


def _switch_cells(scale: Scale) -> Cells:
    changes: dict[str, Any] = {"processes": 2} if scale is Scale.SMALL else {}
    ends = {"BN": DetectionCell("bn", changes=changes), "SyncBN": DetectionCell("sync_bn", changes=changes)}
    switched = {
        f"SyncBN after {epoch}/12": DetectionCell("bn", switch=epoch / 12, changes=changes) for epoch in (8, 9, 10, 11)
    }
    return {**ends, **switched}


TABLES = {
    "coco_norms": DetectionTable(
        "Detection: norms in the heads of Faster R-CNN, and everywhere",
        _norm_cells,
        "fixed BN, CBN",
        seeds=3,
        paper=coco_paper.NORMS,
        remarks=(
            "Rows are the norm of the backbone, then that of the heads. Fixed BN keeps the statistics, gamma and "
            "beta of the trained backbone; otherwise the norm is everywhere but in its early stages.",
        ),
    ),
    "coco_backbones": DetectionTable(
        "Detection: Faster and Mask R-CNN, by backbone",
        _backbone_cells,
        "Mask R-CNN, EfficientNet-Lite0, CBN",
        seeds=1,
        paper=coco_paper.BACKBONES,
        remarks=("The norm is in the heads. The score of boxes, and of Mask R-CNN that of masks as well.",),
    ),
    "coco_window": DetectionTable(
        "Detection: how many steps to pool",
        _window_cells,
        "heads, k = 1",
        seeds=2,
        remarks=("k = 1 is BN. The paper shows windows for classification only.",),
    ),
    "coco_burn_in": DetectionTable(
        "Detection: how long a training begins with BN",
        _burn_in_cells,
        "burn-in 0%",
        seeds=1,
        remarks=("Shares of the training; CBN in the heads. The paper shows burn-in for classification only.",),
    ),
    "coco_switch": DetectionTable(
        "Detection: BN that is switched to SyncBN late in training",
        _switch_cells,
        "SyncBN",
        seeds=2,
        paper=coco_paper.SWITCH,
        remarks=(
            "Norms in the heads. At small scale two processes of 2 images train side by side: SyncBN has statistics "
            "of four images where BN has two.",
        ),
        ALONE=True,
    ),
}
"""By the name that `crossbn reproduce` takes."""
