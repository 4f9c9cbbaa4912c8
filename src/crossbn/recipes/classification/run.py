"""Putting a recipe's parts together and letting the engine run them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crossbn.datasets import DATASETS, load_pictures
from crossbn.integrations.engine import Trainer
from crossbn.recipes.classification.clock import Clock
from crossbn.recipes.classification.images import UPRIGHT, Images, MemoryImages, Scaling, choose, resize
from crossbn.recipes.classification.loading import Supply
from crossbn.recipes.classification.module import Classifier
from crossbn.recipes.classification.networks import build_network, is_small
from crossbn.recipes.classification.norms import apply_norm_
from crossbn.recipes.classification.order import Plan
from crossbn.recipes.classification.recipe import Outcome, Point, Progress, Recipe, RecipeError


def carry_out(recipe: Recipe, folder: Path | None, watch: Callable[[Point | Progress], None]) -> Outcome:
    """Do what `train` promises."""
    images = load_images(recipe)
    plan = Plan.of(recipe, len(images.train), 1)  # type: ignore[arg-type]  # ours have a length
    network = build_network(recipe.model, images.channels, images.classes, recipe.width, recipe.seed)
    apply_norm_(network, recipe, plan.forwards, round(recipe.burn_in_epochs * plan.forwards_per_epoch))
    if recipe.wrap is not None:
        network = recipe.wrap(network, recipe)
    module = Classifier(network, recipe, plan, images.classes, watch)
    clock = Clock()
    with _quiet():
        trainer = Trainer(
            max_epochs=len(module.spans),
            reload_dataloaders_every_n_epochs=1,
            accumulate_grad_batches=recipe.accumulate,
            precision=recipe.precision,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        trainer.fit(module, Supply(images, plan, recipe.seed))
    return Outcome(recipe, tuple(module.curve), len(images.test), clock.seconds, clock.seconds_per_step)  # type: ignore[arg-type]


def load_images(recipe: Recipe) -> Images:
    """Return the images that a recipe trains and tests on."""
    if recipe.data not in DATASETS:
        raise RecipeError(f"there is no data set {recipe.data!r}; there are {', '.join(DATASETS)}")
    known = DATASETS[recipe.data]
    train, test = (
        choose(pictures.images, pictures.classes, count)
        for pictures, count in (
            (load_pictures(recipe.data, train=True), recipe.train_images),
            (load_pictures(recipe.data, train=False), recipe.test_images),
        )
    )
    channels = known.channels if is_small(recipe.model) else 3
    pixels = resize(train[0], recipe.image_size)
    scaling = Scaling.of(pixels)
    mirror = recipe.augment and recipe.data not in UPRIGHT
    return Images(
        MemoryImages(pixels, train[1], scaling, channels, crop=recipe.augment, mirror=mirror),
        MemoryImages(resize(test[0], recipe.image_size), test[1], scaling, channels),
        channels,
        known.classes,
        pixels.shape[-1],
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the engine says about itself, and its advice, out of the way."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")  # images in memory need none
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # Lightning asks torch in an old way
            yield
    finally:
        logger.setLevel(before)
