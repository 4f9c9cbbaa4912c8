"""The library of compiled code: loading it, its structures, and the tensors that it can be handed."""

import _ctypes
import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from crossbn.ops import library

DTYPES = [torch.float32, torch.float64]


def test_it_was_compiled() -> None:
    """Where the tests run there is a compiler; without one the others would compare torch with itself."""
    assert library.is_available()
    with library.switched_off():
        assert not library.is_available()
    assert library.is_available()


X = torch.randn(2, 3, 4, 4)
LAST = X.to(memory_format=torch.channels_last)
FITS: dict[str, tuple[Tensor, bool, int]] = {
    "dense": (X, True, 0),
    "part of each image": (X[:, 1:], False, 0),
    "channels last": (LAST, False, 3),
    "part of the channels, last": (LAST[:, 1:], False, 3),
    "one channel of them": (LAST[:, 1:2], False, 3),
    "a parameter": (nn.Parameter(X), True, 0),
    "doubles": (X.double(), True, 0),
}
UNFIT: dict[str, Tensor] = {
    "half": X.half(),
    "whole numbers": X.int(),
    "elsewhere": X.to("meta"),
    "other layout": X.transpose(2, 3),
    "repeated": X[:, :1].expand(2, 3, 4, 4),
    "repeated in space": X[..., 0, 0, None, None].expand(2, 3, 4, 4),
    "channels last, others between them": LAST[:, ::2],
    "every second": X[..., ::2],
    "negated when read": torch._neg_view(X),
}


@pytest.mark.parametrize("name", FITS)
def test_address_of_what_fits(name: str) -> None:
    tensor, is_dense, place = FITS[name]
    expected = tensor.data_ptr(), tensor.stride(0), place
    assert library.batch_at(tensor, tensor.dtype, tensor.shape) == expected
    if is_dense:
        assert library.address(tensor, tensor.dtype, tensor.shape) == tensor.data_ptr()
    else:
        with pytest.raises(library.Unfit):
            library.address(tensor, tensor.dtype, tensor.shape)
    assert library.address(None, tensor.dtype, tensor.shape) is None


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit(name: str) -> None:
    tensor = UNFIT[name]
    for find in (library.address, library.batch_at):
        with pytest.raises(library.Unfit):
            find(tensor, torch.float32, tensor.shape)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float64, (2, 3, 4, 4)), (torch.float32, (2, 3, 16))])
def test_another_type_or_shape_does_not_fit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with pytest.raises(library.Unfit):
        library.address(X, dtype, shape)


def test_a_tensor_of_a_transform_does_not_fit() -> None:
    torch.func.vmap(_assert_unfit)(X)


def _assert_unfit(x: Tensor) -> Tensor:
    with pytest.raises(library.Unfit):
        library.address(x, x.dtype, x.shape)
    return x


@pytest.mark.parametrize(("dtype", "used"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)])
def test_it_is_used_for_what_it_is_for(dtype: torch.dtype, used: bool) -> None:
    assert library.in_use(torch.ones(1, dtype=dtype)) is used
    with library.switched_off():
        assert not library.in_use(torch.ones(1, dtype=dtype))


def test_it_can_be_done_without() -> None:
    code = "from crossbn.ops import library; print(library.is_available())"
    environment = {"CROSSBN_NATIVE": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"


def test_structures_are_those_of_the_library() -> None:
    for dtype in DTYPES:
        fields = {name: kind for name, kind, *_ in library.structures["memory", dtype]._fields_}
        assert fields["y"] is library.POINTER
        assert fields["y_stride"] is library.NUMBER
    assert library.structures["tables", None].size.size == 3 * 8


@pytest.mark.parametrize("name", ["of another purpose", "of no machine", "missing"])
def test_a_library_that_is_none_is_not_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library._load() is not None
    path = tmp_path / "library.so"
    if name == "of another purpose":
        path.symlink_to(_ctypes.__file__)
    elif name == "of no machine":
        path.write_text("no library")
    monkeypatch.setenv("CROSSBN_LIBRARY", str(path))
    with pytest.warns(UserWarning, match="compiled code is not used, torch's operators do the same slower"):
        assert library._load() is None


def test_a_library_in_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("crossbn.ops._native")
    assert found is not None
    assert found.origin is not None
    path = tmp_path / "library.so"
    path.write_bytes(Path(found.origin).read_bytes())
    monkeypatch.setenv("CROSSBN_LIBRARY", str(path))
    loaded = library._load()
    assert loaded is not None
    x, mean, var = torch.tensor([1.0, 3.0]), torch.empty(1), torch.empty(1)
    loaded.functions[torch.float32]["moments"](x.data_ptr(), 2, 1, 1, 1, 0, mean.data_ptr(), var.data_ptr(), 1)
    assert (mean.item(), var.item()) == (2.0, 1.0)


def test_a_library_whose_structures_are_laid_out_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_LETTERS", {**library._LETTERS, "n": ctypes.c_int32})
    with pytest.warns(UserWarning, match="laid out otherwise than ctypes would"):
        assert library._load() is None


def test_a_library_whose_results_lie_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ALIGNED", 8)
    with pytest.warns(UserWarning, match="results are aligned to 16 numbers there, to 8 here"):
        assert library._load() is None
