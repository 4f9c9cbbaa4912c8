"""Runs that stop and go on, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crossbn.lab.recipes.detection import Machine, OtherRunError, train
from tests.lab.recipes.classification.runs import CrashError, differences
from tests.lab.recipes.detection.runs import SMALL, finish, without_times
from tests.processes import kill_after_a_checkpoint

RUN = replace(SMALL, model="mask_rcnn", scales=(48, 56))
SWITCHING = replace(SMALL, norm="bn", switch_norm="cbn", switch_epoch=1.0)


def run_in_a_process(folder: Path) -> None:
    """What the process that is killed does."""
    train(RUN, folder, machine=Machine(checkpoint_seconds=0.0))


@pytest.mark.slow
def test_goes_on_after_kill_9(tmp_path: Path) -> None:
    kill_after_a_checkpoint(run_in_a_process, tmp_path / "killed")
    reached = torch.load(tmp_path / "killed" / "last.ckpt", weights_only=True)["global_step"]
    assert 0 < reached < 8
    straight, resumed = (finish(RUN, tmp_path / name) for name in ("straight", "killed"))
    assert differences(without_times(straight[1]), without_times(resumed[1])) == []
    assert straight[0].curve == resumed[0].curve


@pytest.mark.parametrize("crash", [3, 6])
def test_goes_on_before_and_after_a_switch_of_norms(
    crash: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crossbn.lab.recipes.detection.module import Detector

    step = Detector.training_step
    left = [crash]

    def fail_at(self: Detector, *args: object) -> object:
        if left[0] == 0:
            raise CrashError
        left[0] -= 1
        return step(self, *args)  # type: ignore[arg-type]  # as the engine calls it

    with monkeypatch.context() as patched:
        patched.setattr(Detector, "training_step", fail_at)
        with pytest.raises(CrashError):
            train(SWITCHING, tmp_path / "crashed", machine=Machine(checkpoint_steps=1))
    found = torch.load(tmp_path / "crashed" / "last.ckpt", weights_only=True)
    assert (found["global_step"], found["detection"]["switched"]) == (crash, crash > 4)
    straight, resumed = (finish(SWITCHING, tmp_path / name) for name in ("straight", "crashed"))
    assert differences(without_times(straight[1]), without_times(resumed[1])) == []


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    train(replace(SMALL, norm="bn", epochs=1), tmp_path)
    with pytest.raises(OtherRunError, match="is of another run: norm 'bn', not 'gn'"):
        train(replace(SMALL, norm="gn", epochs=1), tmp_path)
    (tmp_path / "record.jsonl").unlink()
    with pytest.raises(OtherRunError, match=r"is of another run: norm_momentum None, not 0\.2"):
        train(replace(SMALL, norm="bn", epochs=1, norm_momentum=0.2), tmp_path)
    torch.save({}, tmp_path / "last.ckpt")
    with pytest.raises(OtherRunError, match="is no checkpoint of a detection"):
        train(replace(SMALL, norm="bn", epochs=1), tmp_path)
