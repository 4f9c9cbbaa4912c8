"""A run that is cut in two by a checkpoint and a new process, and batches that are cut into micro-batches."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from tests.support import move_alike_

# Maps of 12x12 and 6x6 in batches of 4: 32 positions are 8 of each example's 144 or 36.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"positions": 32},
    "burn-in ends after the save": {"positions": 32, "burn_in": 13},
    "burn-in ends before the save": {"positions": 32, "burn_in": 8},
    "second order": {"positions": 32, "order": 2},
    "all positions": {"positions": None, "backward": "detached"},
}


class Run:
    """A model, momentum SGD and an endless supply of data."""

    def __init__(self, variant: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
        crossbn.convert_(self.model, window=4, **VARIANTS[variant])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 3, 12, 12, generator=generator)
            target = torch.randint(3, (4,), generator=generator)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), target).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": crossbn.history_state(self.model),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        crossbn.load_history_state(self.model, state["history"])


def go_on(directory: Path) -> None:
    """What the new process does."""
    torch.set_num_threads(1)
    for variant in VARIANTS:
        run = Run(variant)
        run.load(torch.load(directory / f"{variant}.half.pt", weights_only=True))
        run.train(range(10, 20))
        torch.save(run.state(), directory / f"{variant}.whole.pt")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every variant has been trained for 10 steps here and 10 more in another process."""
    directory = tmp_path_factory.mktemp("resume")
    for variant in VARIANTS:
        run = Run(variant)
        run.train(range(10))
        torch.save(run.state(), directory / f"{variant}.half.pt")
    command = [sys.executable, "-W", "error", "-m", "tests.nn.test_resume", str(directory)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_equals_straight_run(directory: Path, variant: str) -> None:
    run = Run(variant)
    run.train(range(20))
    straight, resumed = run.state(), torch.load(directory / f"{variant}.whole.pt", weights_only=True)
    for part in ("model", "history"):
        assert straight[part].keys() == resumed[part].keys()
        assert [name for name in straight[part] if not torch.equal(straight[part][name], resumed[part][name])] == []
    pooled = int(straight["history"]["1/0/pushed"])
    assert pooled == 20 - VARIANTS[variant].get("burn_in", 0)


def test_without_its_history_a_run_goes_another_way() -> None:
    straight, resumed = Run("plain"), Run("plain")
    straight.train(range(12))
    resumed.train(range(10))
    resumed.load({**resumed.state(), "history": crossbn.history_state(Run("plain").model)})
    resumed.train(range(10, 12))
    assert not torch.allclose(straight.model[0].weight, resumed.model[0].weight, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("positions", [None, 12])
def test_last_micro_batch_sees_the_whole_batch(order: int, positions: int | None) -> None:
    """Also after the weights have moved: by then the window holds this batch's micro-batches only."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    plain.load_state_dict(model.state_dict())
    crossbn.convert_(model, window=4, order=order, positions=positions, weights="equal")
    for _ in range(3):
        batch = torch.randn(8, 3, 6, 6, dtype=torch.float64) + 0.5
        parts: list[Tensor] = [model(micro) for micro in batch.split(2)]
        torch.testing.assert_close(parts[-1], plain(batch)[-2:], rtol=0, atol=1e-12)
        move_alike_(model, plain, size=0.3)


if __name__ == "__main__":
    go_on(Path(sys.argv[1]))
