"""The paper's tables and figures of detection, a specification each: rows that are trainings, columns their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossbn.lab.experiments import detection, paper
from crossbn.lab.experiments.detection import TITLES, DetectionCell, settings_of
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.table import Specification, list_rows
from crossbn.lab.records import Record, Task
from crossbn.schedules import window_for

Cells = Mapping[str, DetectionCell]
"""By what they are called."""
_SCORES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "mask AP", "mask AP50", "mask AP75")
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
    windows = (1, 2, 4, 8) if scale is Scale.SMALL else (1, 2, 4, 8, 16)
    places = {"heads": "heads", "everywhere": "all"}
    return {
        f"{place}, k = {window}": DetectionCell("bn", where) if window == 1 else DetectionCell("cbn", where, window)
        for place, where in places.items()
        for window in windows
    }


def _pyramid_cells(scale: Scale) -> Cells:
    cells = {"CBN in the heads": _cell("cbn", scale)}
    for norm in ("bn", "cbn"):
        cells[f"{_TITLES[norm]} everywhere"] = _cell(norm, scale, "all")
        cells[f"{_TITLES[norm]}, none in the pyramid"] = _cell(norm, scale, "all", plain_pyramid=True)
    cells["CBN with a prior, none in the pyramid"] = _cell("cbn", scale, "all", plain_pyramid=True, prior=True)
    return cells


def _burn_in_cells(scale: Scale) -> Cells:
    return {f"burn-in {share:.0%}": _cell("cbn", scale, burn_in=share) for share in (0.0, 0.1, 0.25, 0.5, 0.75)}


def _switch_cells(scale: Scale) -> Cells:
    changes: dict[str, Any] = {"processes": 2} if scale is Scale.SMALL else {}
    epochs = (8, 10) if scale is Scale.SMALL else (8, 9, 10, 11)
    ends = {"BN": DetectionCell("bn", changes=changes), "SyncBN": DetectionCell("sync_bn", changes=changes)}
    switched = {f"SyncBN after {epoch}/12": DetectionCell("bn", switch=epoch / 12, changes=changes) for epoch in epochs}
    return {**ends, **switched}


@dataclass(frozen=True)
class DetectionTable(Specification):
    """A table of trained detectors."""

    kind = detection.KIND
    measures = (*(Measure(name, f"{name}, %", ".1f") for name in _SCORES), Measure("milliseconds", "ms / step", ",.0f"))
    # Functions of a module, so that another process can find them.
    estimate_seconds = staticmethod(detection.estimate_seconds)
    check = staticmethod(detection.check)
    work = staticmethod(detection.work)

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return the trainings."""
        count = seeds or (1 if scale is Scale.FULL else self.seeds)
        return detection.make_tasks(self.cells(scale).values(), scale, count)

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return a row for each training: its scores at the end in percent, and the time of a step."""
        full = any(record.settings["data"] == detection.COCO for record in records)
        names = {label: cell.name for label, cell in self.cells(Scale.FULL if full else Scale.SMALL).items()}
        known = paper.numbers(self.name)
        return list_rows(records, _numbers, names=names, measure="AP", against=self.against, known=known)


def _numbers(record: Record) -> dict[str, float | None]:
    """Return the scores that there are, in percent, and milliseconds; images may have no objects of a size."""
    values: Any = record.values
    scores = {name: 100 * score for name, score in values["scores"].items() if score is not None and name in _SCORES}
    return {**scores, "milliseconds": 1000 * values["seconds_per_step"]}


_SPECIFICATIONS = (
    DetectionTable(
        "coco_norms", "Detection: norms in the heads of Faster R-CNN, and everywhere", _norm_cells, "fixed BN, CBN"
    ),
    DetectionTable(
        "coco_backbones",
        "Detection: Faster and Mask R-CNN, by backbone",
        _backbone_cells,
        "Mask R-CNN, EfficientNet-Lite0, CBN",
        seeds=1,
    ),
    DetectionTable("coco_window", "Detection: how many steps to pool", _window_cells, "heads, k = 1", seeds=2),
    DetectionTable(
        "coco_pyramid",
        "Detection: norms everywhere, with and without those of the pyramid (ours, not the paper's)",
        _pyramid_cells,
        "CBN with a prior, none in the pyramid",
        seeds=2,
        scales=(Scale.SMALL,),
    ),
    DetectionTable(
        "coco_burn_in", "Detection: how long a training begins with BN", _burn_in_cells, "burn-in 0%", seeds=1
    ),
    DetectionTable(
        "coco_switch",
        "Detection: BN that is switched to SyncBN late in training",
        _switch_cells,
        "SyncBN",
        seeds=2,
        alone=True,
    ),
)
TABLES = {table.name: table for table in _SPECIFICATIONS}
"""By the name that `crossbn reproduce` takes."""
