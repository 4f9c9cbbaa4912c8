"""The compiled code; all else about the package is in pyproject.toml.

Without a compiler torch's operators do the same, slower, so it is optional. CROSSBN_NATIVE=0, which switches it off
when the package runs, leaves it out when the package is built: the wheel is then one for every platform.
"""

import os
from glob import glob

from setuptools import Extension, setup

NATIVE = Extension(
    "crossbn.ops._native",
    sources=["src/crossbn/ops/csrc/library.c"],
    depends=sorted(glob("src/crossbn/ops/csrc/*.h")),  # noqa: PTH207  # setuptools wants relative paths
    extra_compile_args=["-O3", "-fopenmp"],
    extra_link_args=["-fopenmp"],
    optional=True,
)

setup(ext_modules=[] if os.environ.get("CROSSBN_NATIVE") == "0" else [NATIVE])
