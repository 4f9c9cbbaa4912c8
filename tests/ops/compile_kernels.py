"""Compiles every kernel for cards that need not be there, and prints registers and spills as NVIDIA's tool tells them.

Run by `test_triton_compiled.py`, in a process of its own: kernels are either interpreted or compiled.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossbn.ops import gpu_step, kernels

_FLOATS = {"decay", "price", "eps", "tolerance", "rounding", "positions", "momentum"}
_POINTERS = {"num_steps": "*i64", "keep": "*i64", "tracked": "*i64"}
_NUMBERS = {
    *("images", "inputs", "outputs", "amount", "samples", "jump", "kept_size", "channels", "of_group", "size", "steps"),
    *("row_size", "at_size", "bulk_size", "programs", "mean_step", "mean_channel", "share_channel", "of_others"),
    *kernels.GEOMETRY,
    *(f"{of}_{stride}" for of in "xy" for stride in ("image", "channel", "place")),
}
_TILES = ((1, 1024), (16, 64), (64, 16))
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gather": [
        {"MODE": mode, "CHANNELS": tall, "PLACES": wide, "SAMPLES": 16, "COPIED": 1024}
        for mode in range(5)
        for tall, wide in _TILES
    ],
    "differentiate": [{"SAMPLES": 16, "NUMBERS": numbers} for numbers in (16, 128)],
    "pool": [
        {"AUTOMATIC": automatic, "SAMPLED": sampled, "CHECKED": True, "LOOKED": True, "AGES": ages}
        | {"CHANNELS": 32 if sampled else 16, "NUMBERS": 32, "MANY": 256}
        for automatic in (False, True)
        for sampled in (False, True)
        for ages in (1, 8, 64)
    ],
    "move_running": [{"MANY": 256}],
    "remember": [{"AUTOMATIC": True, "SAMPLED": sampled, "AGES": 8, "COPIED": 1024} for sampled in (False, True)],
    "backward_vectors": [{"HAS_GAMMA": has_gamma, "CHANNELS": 128} for has_gamma in (False, True)],
    "row_coefficients": [{"CHANNELS": 128}],
    "weight_gradient": [{"NUMBERS": 128}],
}


def signature(kernel: Any, constants: dict[str, Any], narrow: str) -> dict[str, str]:
    """Return the types of the arguments; inputs and weights are of a `narrow` type."""
    types = dict.fromkeys(("x", "y", "weight"), f"*{narrow}") if kernel.__name__ != "weight_gradient" else {}
    types |= {**_POINTERS, **dict.fromkeys(_FLOATS, "fp32"), **dict.fromkeys(_NUMBERS, "i32")}
    return {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}


def usage(card: int, narrow: str) -> Iterator[tuple[str, int, int]]:
    """Yield each kernel with its registers, and the bytes of the stack that what does not fit into them needs."""
    for name, variants in VARIANTS.items():
        kernel = getattr(kernels, name)
        for constants in variants:
            types = signature(kernel, constants, narrow)
            yield f"{narrow} {name} {constants}", *_usage(card, name, tuple(types.items()), tuple(constants.items()))


@cache
def _usage(card: int, name: str, types: tuple[Any, ...], constants: tuple[Any, ...]) -> tuple[int, int]:
    """Compile a kernel once, though a narrow type that it does not read was asked for."""
    source = ASTSource(getattr(kernels, name), signature=dict(types), constexprs=dict(constants))
    compiled = triton.compile(source, target=GPUTarget("cuda", card, 32), options=dict(gpu_step.OPTIONS))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", done.stdout + done.stderr)
    assert found is not None, done.stdout + done.stderr
    return int(found[1]), int(found[2]) + int(found[3])


if __name__ == "__main__":
    for narrow in sys.argv[2:]:
        for row in usage(int(sys.argv[1]), narrow):
            print(*row, sep="\t")
