"""Training a classifier as a run of a table: at the paper's size, or at one for two cores."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbn.lab.data import DATASETS, DataError, imagenet_folder, load_pictures
from crossbn.lab.environment import install_command
from crossbn.lab.experiments.cells import CROSS_ITERATION, Cell
from crossbn.lab.experiments.estimates import training_seconds
from crossbn.lab.experiments.experiment import Scale, UnavailableError, Values
from crossbn.lab.progress import Progress, Watch
from crossbn.lab.records import Task

if TYPE_CHECKING:  # they take seconds to import
    from torch import nn

    from crossbn.lab.recipes.classification import Point, Recipe

KIND = "classification"
"""What the runs of all these tables are filed under: the same training is done once."""
POSITIONS = {Scale.SMALL: 128, Scale.MEDIUM: 128, Scale.FULL: None}
"""The library's own choice, and the paper's."""
_RECIPE = {"momentum": 0.9, "weight_decay": 1e-4}
_CIFAR = {"data": "cifar10", "image_size": None, "augment": False, "model": "resnet8", "width": 16, "head": "own"}
_SETTINGS: dict[Scale, dict[str, Any]] = {
    Scale.SMALL: {**_CIFAR, "train_images": 4000, "test_images": 5000, "epochs": 3, "points": 3, **_RECIPE},
    Scale.MEDIUM: {**_CIFAR, "train_images": 10_000, "test_images": 10_000, "epochs": 8, "points": 8, **_RECIPE},
    Scale.FULL: {
        **{"data": "imagenet", "train_images": None, "test_images": None, "image_size": None, "augment": True},
        **{"model": "resnet18", "width": 16, "head": "own", "epochs": 100, "points": None, **_RECIPE},
    },
}


def make_tasks(cells: Iterable[Cell], scale: Scale, seeds: int) -> list[Task]:
    """Return the runs of cells, each once."""
    named = {cell.name: cell for cell in cells}
    return [Task(KIND, name, seed, settings_of(cell, scale)) for name, cell in named.items() for seed in range(seeds)]


def settings_of(cell: Cell, scale: Scale) -> dict[str, Any]:
    """Return everything that a training is told but its seed."""
    shared = {**_SETTINGS[scale], **cell.changes}
    options = dict(cell.options)
    if cell.norm == "cbn":
        options.setdefault("positions", POSITIONS[scale])
    return {
        **{"norm": cell.norm, "norm_options": options, "window": cell.window, "gradient": cell.gradient},
        **{"batch_size": cell.batch_size, "learning_rate": 0.1 * cell.batch_size / 32},
        **{"burn_in_epochs": cell.burn_in * shared["epochs"], **shared},
        **({} if cell.variant is None else {"variant": cell.variant}),  # runs without one stay what they were
    }


def scale_of(records: Sequence[Task]) -> Scale:
    """Return the scale that records are of."""
    told: list[Any] = [record.settings for record in records]
    if any(each["data"] == "imagenet" for each in told):
        return Scale.FULL
    epochs = _SETTINGS[Scale.MEDIUM]["epochs"]
    return Scale.MEDIUM if any(each["epochs"] == epochs for each in told) else Scale.SMALL


def check(tasks: Sequence[Task]) -> None:
    """Raise UnavailableError if the training engine or the images of one of the runs are not there."""
    if find_spec("lightning") is None:
        raise UnavailableError(f"trainings need lightning: {install_command('train')}")
    of_timm = [task.settings["norm"] for task in tasks if task.settings["norm"] in ("evonorm_s0", "frn_tlu")]
    if of_timm and find_spec("timm") is None:
        raise UnavailableError(f"{of_timm[0]} is timm's: pip install timm")
    for data in dict.fromkeys(task.settings["data"] for task in tasks):
        try:
            for train in (True, False):
                # Downloaded here, where it is not, and not by several runs at once.
                imagenet_folder(train) if data == "imagenet" else load_pictures(data, train)
        except DataError as error:
            raise UnavailableError(str(error)) from error


def count_images(data: str, wanted: int | None, train: bool = True) -> int:
    """Return how many images a run trains or tests on."""
    return wanted or (DATASETS[data].train_images if train else DATASETS[data].test_images)


def estimate_seconds(task: Task) -> float:
    """Return about how long a run takes on one core: its steps, and the tests on the way."""
    settings: Any = task.settings
    data = settings["data"]
    train, test = count_images(data, settings["train_images"]), count_images(data, settings["test_images"], train=False)
    steps = settings["epochs"] * (train // settings["batch_size"])
    pooled = settings["epochs"] - settings["burn_in_epochs"]
    # Exact statistics let the whole window through the network at each step; other norms the batch.
    batches = 1 + (settings["window"] - 1) * pooled / settings["epochs"] if settings["gradient"] is not None else 1
    forwards = 3 * steps * settings["batch_size"] * batches + (settings["points"] or settings["epochs"]) * test
    calls = steps * (2 if settings["norm"] in CROSS_ITERATION else 1)
    size = settings["image_size"] or DATASETS[data].image_size
    return training_seconds(settings["model"], size, calls, forwards, settings["width"])


def recipe_of(task: Task) -> "Recipe":
    """Return what the training is told."""
    from crossbn.lab.recipes.classification import Recipe

    settings: dict[str, Any] = dict(task.settings)
    head, gradient = settings.pop("head"), settings.pop("gradient")
    if settings["norm"] in CROSS_ITERATION:  # the paper's weights, where the cell does not name others
        settings["norm_options"] = {"weights": "equal", **settings["norm_options"]}
    else:
        settings["window"] = None
    wrap: Callable[[nn.Module, Recipe], nn.Module] | None = None
    if gradient is not None:
        wrap = partial(_revisit, gradient=gradient, window=task.settings["window"])
    elif head == "pooled":
        wrap = pool_head
    return Recipe(**settings, seed=task.seed, wrap=wrap)


def _revisit(network: "nn.Module", recipe: "Recipe", gradient: str, window: int) -> "nn.Module":
    from crossbn.lab.fidelity.bound import ExactWindow

    steps_per_epoch = count_images(recipe.data, recipe.train_images) // recipe.batch_size
    return ExactWindow(network, window, gradient=gradient, burn_in=round(recipe.burn_in_epochs * steps_per_epoch))


def pool_head(network: "nn.Module", _: "Recipe | None" = None) -> "nn.Module":
    """Replace VGG's three large linear layers, which no norm is among, by a mean over space and the last, smaller."""
    from torch import nn

    classifier = network.classifier
    assert isinstance(classifier, nn.Sequential)
    last = classifier[-1]
    assert isinstance(last, nn.Linear)
    network.avgpool = nn.AdaptiveAvgPool2d(1)
    network.classifier = nn.Linear(512, last.out_features)
    return network


def work(task: Task, watch: Watch, folder: Path | None = None) -> Values:
    """Train, or go on with a training that left a checkpoint in the folder."""
    from crossbn.lab.recipes.classification import Machine, train

    def tell(news: "Point | Progress") -> None:
        if isinstance(news, Progress):
            watch(news)

    # A training that diverges is a result of a table, too.
    outcome = train(recipe_of(task), folder, tell, Machine(keep_going=True))
    return {
        **{"accuracy": outcome.accuracy, "test_images": outcome.test_images},
        **{"curve": [point._asdict() for point in outcome.curve], "seconds_per_step": outcome.seconds_per_step},
    }
