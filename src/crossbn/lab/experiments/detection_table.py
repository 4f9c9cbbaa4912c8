"""What the tables of detection have in common: rows that are trainings, scores that are columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crossbn.lab.experiments import coco_paper, detection
from crossbn.lab.experiments.accuracies import describe_differences
from crossbn.lab.experiments.detection import DetectionCell
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.rows import Spread
from crossbn.lab.experiments.tasks import News, Result, Task, Values, by_name

Cells = Mapping[str, DetectionCell]
"""By what they are called."""
_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "mask AP", "mask AP50", "mask AP75")
_MEASURES = (*(Measure(name, f"{name}, %", ".1f") for name in _NAMES), Measure("milliseconds", "ms / step", ",.0f"))


@dataclass
class DetectionTable:
    """A table whose rows are trainings of detectors; see `experiment.Experiment` for what it is to others.

    Attributes:
        TITLE: what the table is.
        cells: returns the rows of a scale.
        against: the row that the others are compared with, where the scale has it.
        seeds: of each row at small scale.
        paper: the paper's scores, by row.
        remarks: what the table's notes say beside what is said of all.
        ALONE: whether a run takes several cores.
        MEASURES: its columns.
    """

    TITLE: str
    cells: Callable[[Scale], Cells]
    against: str
    seeds: int
    paper: coco_paper.Paper = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    ALONE: bool = False
    MEASURES: tuple[Measure, ...] = _MEASURES

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return the trainings."""
        count = seeds or (self.seeds if scale is Scale.SMALL else 1)
        return detection.make_tasks(self.cells(scale).values(), scale, count)

    def estimate_seconds(self, task: Task) -> float:
        """Return about how long a run takes here."""
        return detection.estimate_seconds(task)

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if something that the runs need is missing."""
        detection.check(tasks)

    def work(self, task: Task, watch: Callable[[News], None], folder: Path | None = None, /) -> Values:
        """Do a run, or go on with one that left something in the folder."""
        return detection.work(task, watch, folder)

    def rows(self, results: Sequence[Result]) -> list[Comparison]:
        """Return a row for each training: its scores at the end in percent, and the time of a step."""
        found = by_name(results)
        full = any(result.task.settings["data"] == detection.COCO for result in results)
        cells = self.cells(Scale.FULL if full else Scale.SMALL)
        against = cells.get(self.against)
        reference = {} if against is None else _scores(found.get(against.name, []), "AP")
        rows = []
        for label, cell in cells.items():
            runs = found.get(cell.name, [])
            if not runs:
                continue
            by_score = {name: _scores(runs, name) for name in _NAMES}
            ours = {name: Spread.of([*values.values()]) for name, values in by_score.items() if values}
            ours["milliseconds"] = Spread.of([1000 * run.values["seconds_per_step"] for run in runs])
            others = {} if label == self.against else {self.against: reference}
            remark = describe_differences(by_score["AP"], others)
            rows.append(Comparison(label, ours, self.paper.get(label, {}), remark))
        return rows

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are."""
        return [_SETTING[scale], _SCORING, *self.remarks]


def _scores(runs: Sequence[Result], name: str) -> dict[int, float]:
    """Return a score by seed, in percent."""
    found = {run.task.seed: run.values["scores"].get(name) for run in runs}
    return {seed: 100 * score for seed, score in found.items() if score is not None}


_SETTING = {
    Scale.SMALL: (
        "Small scale: Faster R-CNN on EfficientNet-Lite0 with ImageNet's weights and a feature pyramid, 64 channels "
        "wide, with a head of four convolutions and a linear layer, 64 proposals of an image; 256 pixels, batches of "
        "2, 4 epochs on one core, the paper's recipe otherwise: SGD, momentum 0.9, weight decay 1e-4, a learning "
        "rate of 0.02 / 16 for each image of a step that is warmed up over the first epoch and divided by ten after "
        "9/12 and 11/12 of the training. CBN has the library's own settings. Images: the folder in COCO's format "
        "that --data names, the 535 + 129 nuclei of dsb2018_nuclei in it, or drawn shapes where there are none. The "
        "paper's numbers are of another network, other images and 25 times the steps: expect the order of the norms, "
        "not the size of the differences."
    ),
    Scale.FULL: (
        "COCO 2017 with the paper's recipe: Faster R-CNN, ResNet-50 with ImageNet's weights and FPN, a head of four "
        "convolutions and a linear layer, 4 processes of 4 images, 12 epochs, shorter sides of 800 pixels; CBN with "
        "equal weights on all positions. This has not been run by those who wrote it."
    ),
}
_SCORING = (
    "AP is COCO's: the mean over overlaps of 0.5 to 0.95, on the test images after the last step. Seeds change the "
    "initial weights of pyramid and heads, the order of the images and what is drawn in training. Differences are "
    "mean differences of AP between runs of the same seed, in points; a question mark stands where one is less than "
    "twice its standard error over the seeds and may be chance."
)
