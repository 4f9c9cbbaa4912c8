"""Every example runs at toy size, as a user would start it, and prints what it is to show."""

import re
from pathlib import Path

import pytest

from tests.support import run_python

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(name: str, folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> str:
    """Run an example in an empty folder, without a network; return what it printed."""
    variables = {
        **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "YOLO_OFFLINE": "1", "YOLO_CONFIG_DIR": str(folder)},
        "PYTHONPATH": str(EXAMPLES.parent / "src"),
    }
    return run_python(*launcher, EXAMPLES / f"{name}.py", "--toy", *options, folder=folder, variables=variables)


def number(pattern: str, text: str) -> float:
    """The number at the place of # in the pattern."""
    found = re.search(re.escape(pattern).replace(r"\#", r"(-?\d+(?:\.\d+)?)"), text)
    assert found is not None, f"{pattern!r} is not in {text!r}"
    return float(found[1])


@pytest.mark.slow
def test_accumulation(tmp_path: Path) -> None:
    printed = run("accumulation", tmp_path)
    large, small = number("BN, micro-batches of 32: #", printed), number("BN, micro-batches of 2: #", printed)
    pooled = number("CBN, micro-batches of 2: #", printed)
    assert large > 80 > 60 > small
    assert pooled > large - 10


@pytest.mark.slow
def test_fsdp(tmp_path: Path) -> None:
    printed = run("fsdp", tmp_path, launcher=TORCHRUN)
    assert printed.count("equal: True") == 2


@pytest.mark.slow
def test_gan(tmp_path: Path) -> None:
    printed = run("gan", tmp_path)
    assert printed.count("1 norms: 1 compensated") == 2
    assert number("# after", printed) < 0.5 * number("# before", printed)


@pytest.mark.slow
def test_monai(tmp_path: Path) -> None:
    printed = run("monai_unet", tmp_path)
    assert "6 norms: 6 compensated" in printed
    assert number("cbn: Dice #", printed) > 20  # all or nothing would have about 5


@pytest.mark.slow
def test_segmentation(tmp_path: Path) -> None:
    printed = run("segmentation", tmp_path)
    lines = dict(line.split(": ", 1) for line in printed.splitlines())
    cut = {norm: number("at the seam #", line) for norm, line in lines.items()}
    overlapping = {norm: number("with overlap #", line) for norm, line in lines.items()}
    assert min(cut.values()) > 0.2  # zeros in place of the other half disturb every norm
    assert max(overlapping["bn"], overlapping["cbn"]) < 0.04 < 0.06 < min(overlapping["gn"], overlapping["in"])
    assert number("Dice #", lines["cbn"]) > number("Dice #", lines["bn"])


@pytest.mark.slow
def test_segmentation_without_images(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"error: give --toy, or --data FOLDER .* got {tmp_path}"):
        run_python(EXAMPLES / "segmentation.py", "--data", tmp_path)


@pytest.mark.slow
def test_timm(tmp_path: Path) -> None:
    printed = run("timm_finetune", tmp_path)
    assert "15 norms: 15 compensated" in printed
    assert number("CBN: #", printed) > number("\nBN: #", printed)


@pytest.mark.slow
def test_transformers(tmp_path: Path) -> None:
    printed = run("transformers_trainer", tmp_path)
    assert number("CBN: #", printed) > 15  # ten classes
    assert "resumed, equal: True" in printed


@pytest.mark.slow
def test_yolo(tmp_path: Path) -> None:
    printed = run("yolo", tmp_path)
    assert "81 norms trained with windows of 8" in printed
    assert "81 norms saved, BatchNorm: True" in printed


def test_examples_are_short_and_tested() -> None:
    examples = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert {name for name, text in examples.items() if len(text.splitlines()) > 120} == set()
    tests = Path(__file__).read_text()
    assert {name for name in examples if f'run("{name}"' not in tests} == set()
