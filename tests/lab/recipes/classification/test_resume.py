"""A run that is stopped goes on bit for bit: weights, optimizer, history, curve, everything in the last checkpoint."""

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from crossbn.integrations.lightning import LOGGER
from crossbn.lab.recipes.checkpoints import CheckpointError
from crossbn.lab.recipes.classification import Machine, OtherRunError, Progress, Recipe, RecipeError, train
from tests.lab.recipes.classification.runs import SMALL, CrashError, Fragile, differences, finish
from tests.processes import kill_after_a_checkpoint

# Two epochs of 10 forwards; three points, after 7, 14 and 20 of them.
RECIPE = replace(SMALL, points=3)
OFTEN = Machine(checkpoint_steps=1)


def crash(recipe: Recipe, folder: Path, forward: int, machine: Machine = OFTEN) -> int:
    """Train until the forward of that number fails; return the step of the checkpoint, 0 if there is none."""
    with pytest.raises(CrashError):
        train(replace(recipe, wrap=lambda network, _: Fragile(network, forward)), folder, machine=machine)
    path = folder / "last.ckpt"
    return torch.load(path, weights_only=True)["global_step"] if path.exists() else 0


def go_on(recipe: Recipe, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Finish a run whose network has the same name that it had when it crashed."""
    return finish(replace(recipe, wrap=lambda network, _: Fragile(network, 10**9)), folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return go_on(RECIPE, tmp_path_factory.mktemp("straight"))[1]


@pytest.mark.parametrize(
    ("forward", "step"), [(0, 0), (1, 1), (6, 6), (7, 7), (14, 14), (19, 19)], ids=lambda value: str(value)
)
def test_goes_on_after_a_crash_in_any_forward(
    forward: int, step: int, straight: dict[str, Any], tmp_path: Path
) -> None:
    assert crash(RECIPE, tmp_path, forward) == step
    outcome, resumed = go_on(RECIPE, tmp_path)
    assert differences(straight, resumed) == []
    assert len(outcome.curve) == 3
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 1


def test_goes_on_after_several_crashes(straight: dict[str, Any], tmp_path: Path) -> None:
    # Counted from where the run goes on: without checkpoints within an epoch, from the last point.
    seldom = replace(OFTEN, checkpoint_steps=None)
    assert [crash(RECIPE, tmp_path, forward, seldom) for forward in (5, 9, 3, 8)] == [0, 7, 7, 14]
    assert differences(straight, go_on(RECIPE, tmp_path)[1]) == []


class Dropping(nn.Module):
    """Dropout before the network: it takes the process's random numbers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Dropout(0.3), network)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2, "batch_size": 2, "burn_in_epochs": 0.7},
        {"norm": "bn", "switch_norm": "cbn", "switch_epoch": 0.5},
        {"norm": "cbn", "switch_norm": "bn", "switch_epoch": 0.5},
        {"norm": "bn", "switch_norm": "gn", "switch_epoch": 0.2},
        {"norm": "kn", "augment": False},
        {"norm": "brn", "reparametrize": "ws", "precision": "bf16-mixed"},
        {"norm": "cbn", "norm_options": {"order": 2, "positions": 4}, "points": 1},
    ],
    ids=str,
)
def test_goes_on_whatever_the_recipe(changes: dict[str, Any], tmp_path: Path) -> None:
    def fragile(forward: int, network: nn.Module, _: Recipe) -> nn.Module:
        return Fragile(Dropping(network), forward)

    recipe = replace(RECIPE, **{"epochs": 1, **changes})
    expected, straight = finish(replace(recipe, wrap=partial(fragile, 10**9)), tmp_path / "straight")
    with pytest.raises(CrashError):
        train(replace(recipe, wrap=partial(fragile, 7)), tmp_path / "crashed", machine=OFTEN)
    outcome, resumed = finish(replace(recipe, wrap=partial(fragile, 10**9)), tmp_path / "crashed")
    assert differences(straight, resumed) == []
    assert outcome.curve == expected.curve


@pytest.fixture
def _news_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from crossbn.lab.recipes import clock

    monkeypatch.setattr(clock, "_SECONDS_BETWEEN_NEWS", 0.0)


def send_in_forward_5(number: signal.Signals, news: object) -> None:
    if isinstance(news, Progress) and news.share == 4 / 20:
        os.kill(os.getpid(), number)


@pytest.mark.usefixtures("_news_at_once")
@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_saves_and_stops(
    number: signal.Signals, end: type[BaseException], straight: dict[str, Any], tmp_path: Path
) -> None:
    # Where the tests run in the background, a shell may have had them ignore it.
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    found = signal.signal(number, before)
    with pytest.raises(end) as raised:
        train(
            replace(RECIPE, wrap=lambda network, _: Fragile(network, 10**9)),
            tmp_path,
            partial(send_in_forward_5, number),
        )
    assert signal.signal(number, found) == before
    assert number == signal.SIGINT or raised.value.code == 143  # type: ignore[attr-defined]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5
    assert differences(straight, go_on(RECIPE, tmp_path)[1]) == []


@pytest.mark.usefixtures("_news_at_once")
def test_interrupts_stay_ignored_where_they_are(tmp_path: Path) -> None:
    """As in the processes that `crossbn reproduce` starts: it ends them itself."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = train(RECIPE, tmp_path, partial(send_in_forward_5, signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(outcome.curve) == 3


def test_fresh_begins_anew(straight: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_text("something else")
    (tmp_path / "record.jsonl").write_text("something else")
    train(replace(RECIPE, wrap=lambda network, _: Fragile(network, 10**9)), tmp_path, fresh=True)
    assert differences(straight, torch.load(tmp_path / "last.ckpt", weights_only=True)) == []
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 1


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    crash(RECIPE, tmp_path, 3)
    with pytest.raises(RecipeError, match=r"last.ckpt is of another run: norm 'cbn', not 'bn', seed 0, not 5"):
        train(replace(RECIPE, norm="bn", seed=5), tmp_path)
    for name in ("last.ckpt", "previous.ckpt"):
        (tmp_path / name).write_text("something else")
    with pytest.raises(OtherRunError, match=r"last.ckpt is no checkpoint of a classification"):
        train(RECIPE, tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, flip, remove])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: Callable[[Path], None], straight: dict[str, Any], tmp_path: Path
) -> None:
    assert crash(RECIPE, tmp_path, 6) == 6
    damage(tmp_path / "last.ckpt")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    try:
        resumed = go_on(RECIPE, tmp_path)[1]
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
    assert differences(straight, resumed) == []
    told = [line for line in said if "going on from previous.ckpt, the one before it, at step 5" in line]
    assert len(told) == (damage is not remove)


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint(
    straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(RECIPE, tmp_path, 3)
    kept = {name: (tmp_path / name).read_bytes() for name in ("last.ckpt", "previous.ckpt")}
    save = torch.save

    class Full:
        """A file on a disk that is full after a kilobyte."""

        left = 1000

        def write(self, content: Any) -> int:
            self.left -= len(content)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return len(content)

        def flush(self) -> None: ...

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda checkpoint, _: save(checkpoint, cast(Any, Full())))
        with pytest.raises(
            CheckpointError, match=r"last\.ckpt cannot be written: No space left on device; the one before"
        ):
            train(replace(RECIPE, wrap=lambda network, _: Fragile(network, 10**9)), tmp_path, machine=OFTEN)
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    assert not (tmp_path / "last.ckpt.part").exists()
    assert differences(straight, go_on(RECIPE, tmp_path)[1]) == []


def test_a_complete_checkpoint_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash(RECIPE, tmp_path, 3)
    kept = (tmp_path / "last.ckpt").read_bytes()

    def half_written(_: object, file: Any) -> None:
        file.write(b"half")
        raise CrashError

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(CrashError):
        train(replace(RECIPE, wrap=lambda network, _: Fragile(network, 10**9)), tmp_path, machine=OFTEN)
    assert (tmp_path / "last.ckpt").read_bytes() == kept


def run_in_a_process(folder: Path) -> None:
    """What the process that is killed does."""
    train(replace(SMALL, epochs=4, points=3), folder, machine=Machine(checkpoint_seconds=0.0))


@pytest.mark.slow
def test_goes_on_after_kill_9(tmp_path: Path) -> None:
    recipe = replace(SMALL, epochs=4, points=3)
    outcome, straight = finish(recipe, tmp_path / "straight")
    for patience in (0.0, 0.13, 0.41):
        kill_after_a_checkpoint(run_in_a_process, tmp_path / str(patience), patience)
        found, resumed = finish(recipe, tmp_path / str(patience))
        assert differences(straight, resumed) == []
        assert outcome.curve == found.curve
