"""Kernels compiled for cards that are not there: they fit into the registers."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.slow
@pytest.mark.parametrize(("card", "types"), [("75", ["fp32"]), ("80", ["bf16"]), ("90", ["fp16", "fp32"])])
def test_kernels_spill_nothing(card: str, types: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    told = [sys.executable, str(SCRIPT), card, *types]
    done = subprocess.run(told, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    kernels = {"gather", "differentiate", "pool", "remember", "weight_gradient"}
    assert {tuple(name.split()[:2]) for name, _, _ in rows} >= set(product(types, kernels))
    assert all(0 < int(registers) <= 255 for _, registers, _ in rows)
    assert [row for row in rows if row[2] != "0"] == []
