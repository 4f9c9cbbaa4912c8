"""COCO's average precisions, by a maintained evaluator."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from crossbn.compat import ensure_torchvision
from crossbn.integrations.processes import gather_all
from crossbn.lab.recipes.detection.recipe import SCORES, Scores

_NAMES = dict(zip(SCORES, ("map", "map_50", "map_75", "map_small", "map_medium", "map_large"), strict=True))
MASK = "mask "
"""Before the name of a score, that of the masks."""


class ScoreKeeper(nn.Module):
    """Collects what was found in images and what there is, and scores it.

    Args:
        masks: whether masks are scored beside boxes.

    Example:
        >>> there = {"boxes": Tensor([[1, 1, 9, 9]]), "labels": Tensor([1]).long()}
        >>> keeper = ScoreKeeper(masks=False)
        >>> keeper.add([{**there, "scores": Tensor([0.9])}], [there])
        >>> scores = keeper.scores()
        >>> scores["AP"], scores["APl"]
        (1.0, None)
    """

    def __init__(self, masks: bool) -> None:
        super().__init__()
        ensure_torchvision()  # torchmetrics imports it
        from torchmetrics.detection import MeanAveragePrecision

        kinds = {"": "bbox", MASK: "segm"} if masks else {"": "bbox"}
        backend = "faster_coco_eval" if find_spec("faster_coco_eval") is not None else "pycocotools"
        # One for each kind: the sizes of objects are then those of the same areas for both.
        self.metrics = nn.ModuleDict(
            {
                kind: MeanAveragePrecision(iou_type=kind, backend=backend, sync_on_compute=False)
                for kind in kinds.values()
            }
        )
        self.kinds = kinds

    def add(self, found: Sequence[Mapping[str, Tensor]], there: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the objects that a detector has found in images, and those that there are."""
        masked = [
            {**each, "masks": (each["masks"] > 0.5).squeeze(1)} if "masks" in each else dict(each) for each in found
        ]
        known = [{**each, "masks": each["masks"].bool()} if "masks" in each else dict(each) for each in there]
        for kind in self.kinds.values():
            self._metric(kind).update(masked, known)

    def scores(self) -> Scores:
        """Return the scores of all images, those of all processes, and begin anew."""
        found: dict[str, float | None] = {}
        for prefix, kind in self.kinds.items():
            metric = self._metric(kind)
            _join_processes_(metric)
            values = metric.compute()
            nothing = all(len(each) == 0 for each in metric.detection_scores)
            metric.reset()
            for name, theirs in _NAMES.items():
                value = float(values[theirs])
                own = None if value < 0 else value  # -1 where there is nothing of the kind
                # Of masks torchmetrics says so where nothing was found, too: that is as bad as it is for boxes.
                found[f"{prefix}{name}"] = found[name] if nothing and prefix else own
        return found

    def _metric(self, kind: str) -> Any:
        return self.metrics[kind]


def _join_processes_(metric: Any) -> None:
    """Let a metric know what those of the other processes know, which may have seen more images or fewer.

    torchmetrics' own way takes for granted that all have seen equally many.
    """
    own = {
        name: [each.cpu() if isinstance(each, Tensor) else each for each in values]
        for name, values in metric.metric_state.items()
    }
    states = gather_all(own)
    for name in own:
        setattr(metric, name, [each for state in states for each in state[name]])
