"""The paper's numbers of detection on COCO 2017: averages of five trials, whose standard deviations are below 0.1.

"Cross-Iteration Batch Normalization", CVPR 2021: Faster R-CNN with FPN, ResNet-50 where nothing else is said, 4
processes of 4 images, 12 epochs.
"""

from collections.abc import Mapping

_SCORES = ("AP", "AP50", "AP75", "APs", "APm", "APl")
_MASK_SCORES = ("AP", "AP50", "AP75", "mask AP", "mask AP50", "mask AP75")

_NORMS = {
    "fixed BN, none": (36.9, 58.2, 39.9, 21.2, 40.8, 46.9),
    "fixed BN, BN": (36.3, 57.3, 39.2, 20.8, 39.7, 47.3),
    "fixed BN, SyncBN": (37.7, 58.5, 41.1, 22.0, 40.9, 49.0),
    "fixed BN, GN": (37.8, 59.0, 40.8, 22.3, 41.2, 48.4),
    "fixed BN, BRN": (37.4, 58.1, 40.3, 22.0, 40.7, 48.3),
    "fixed BN, CBN": (37.7, 59.0, 40.7, 22.1, 40.9, 48.8),
    "BN, BN": (35.5, 56.4, 38.7, 19.7, 38.8, 47.3),
    "SyncBN, SyncBN": (37.9, 58.5, 41.1, 21.7, 41.5, 49.7),
    "GN, GN": (37.8, 59.1, 40.9, 22.4, 41.2, 49.0),
    "CBN, CBN": (37.7, 58.9, 40.6, 22.0, 41.4, 48.9),
}
_FASTER = {
    "Faster R-CNN, ResNet-50, GN": (37.8, 59.0, 40.8, 22.3, 41.2, 48.4),
    "Faster R-CNN, ResNet-50, SyncBN": (37.7, 58.5, 41.1, 22.0, 40.9, 49.0),
    "Faster R-CNN, ResNet-50, CBN": (37.7, 59.0, 40.7, 22.1, 40.9, 48.8),
    "Faster R-CNN, ResNet-101, GN": (39.3, 60.6, 42.7, 22.5, 42.5, 51.3),
    "Faster R-CNN, ResNet-101, SyncBN": (39.2, 59.8, 43.0, 22.2, 42.9, 51.6),
    "Faster R-CNN, ResNet-101, CBN": (39.2, 60.0, 42.6, 22.3, 42.6, 51.1),
}
_MASK = {
    "Mask R-CNN, ResNet-50, GN": (38.6, 59.8, 41.9, 35.0, 56.7, 37.3),
    "Mask R-CNN, ResNet-50, SyncBN": (38.5, 58.9, 42.3, 34.7, 56.3, 36.8),
    "Mask R-CNN, ResNet-50, CBN": (38.5, 59.2, 42.1, 34.6, 56.4, 36.6),
    "Mask R-CNN, ResNet-101, GN": (40.3, 61.2, 44.2, 36.6, 58.5, 39.2),
    "Mask R-CNN, ResNet-101, SyncBN": (40.3, 60.8, 44.2, 36.0, 57.7, 38.6),
    "Mask R-CNN, ResNet-101, CBN": (40.1, 60.5, 44.1, 35.8, 57.3, 38.5),
}

Paper = Mapping[str, Mapping[str, float]]
"""Scores in percent by row, then by name."""


def _by_name(table: Mapping[str, tuple[float, ...]], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    return {row: dict(zip(names, values, strict=True)) for row, values in table.items()}


NORMS: Paper = _by_name(_NORMS, _SCORES)
"""By the norms of backbone and heads."""
BACKBONES: Paper = {**_by_name(_FASTER, _SCORES), **_by_name(_MASK, _MASK_SCORES)}
SWITCH: Paper = {
    f"SyncBN after {epoch}/12": {"AP": score} for epoch, score in ((8, 37.7), (9, 37.7), (10, 37.6), (11, 37.3))
}
"""By the epoch after which BN is switched to SyncBN."""
