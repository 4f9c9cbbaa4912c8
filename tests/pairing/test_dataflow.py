"""What tensors are made of: how sums and concatenations are kept flat, how wide they are, and what counts as a use."""

import pytest
from torch import nn

from crossbn.pairing.dataflow import Part, Parts, Recorder, Value, add, concatenate, opaque, width


def operator(name: str, channels: int = 4, dimensions: int = 4) -> Part:
    return Part(channels, name, (name,), complete=True, final=True, dimensions=dimensions)


A, B, WIDE, LINEAR = operator("a"), operator("b"), operator("wide", 6), operator("linear", dimensions=2)
(KNOWN,), (UNKNOWN,) = opaque("after relu", 4), opaque("input of the model")


def sum_of(*names: str, channels: int = 4, rest: bool = False) -> Part:
    reason = " + ".join([*names, "rest"] if rest else names)
    return Part(channels, reason, names, complete=not rest, final=True, dimensions=4)


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ([(A,), (B,)], sum_of("a", "b")),
        ([(sum_of("a", "b"),), (KNOWN,)], sum_of("a", "b", rest=True)),
        ([(sum_of("a", rest=True),), (B,)], sum_of("a", "b", rest=True)),
        ([(UNKNOWN,), (A,)], sum_of("a", rest=True)),
        ([(KNOWN,), (UNKNOWN,)], Part(4, "after add")),
        ([(A,), (WIDE,)], Part(6, "after add with broadcast channels")),
        ([(A,), (A,)], Part(4, "after add")),
        ([(sum_of("a", "b"),), (A,)], Part(4, "after add")),
        ([(WIDE,), (Part(2, "x"), A)], sum_of("wide", channels=6, rest=True)),
    ],
)
def test_sums_are_flat(operands: list[Parts], expected: Part) -> None:
    first, second = map(Value, operands)
    assert add(first, second) == (expected,)


@pytest.mark.parametrize(
    ("operands", "dim", "expected"),
    [
        ([(A,), (B,)], 1, (A, B)),
        ([(A,), (UNKNOWN,)], -3, (A, UNKNOWN)),
        ([(LINEAR,), (UNKNOWN,)], -1, (LINEAR, UNKNOWN)),
        ([(A, B), (sum_of("a", "b"),)], 1, (A, B, sum_of("a", "b"))),
        ([(A,)], 1, (A,)),
        ([(A,), (B,)], 0, opaque("after cat along dimension 0")),
        ([(A,), (B,)], -1, opaque("after cat along dimension -1")),
        ([(A,), (LINEAR,)], -3, opaque("after cat along dimension -3")),
        ([(KNOWN,), (UNKNOWN,)], -3, opaque("after cat along dimension -3")),
    ],
)
def test_concatenations_are_flat_and_along_channels(operands: list[Parts], dim: int, expected: Parts) -> None:
    assert concatenate([Value(parts) for parts in operands], dim) == expected


@pytest.mark.parametrize(("parts", "expected"), [((A,), 4), ((UNKNOWN,), None), ((A, WIDE), 10), ((A, UNKNOWN), None)])
def test_width(parts: Parts, expected: int | None) -> None:
    assert width(parts) == expected


def test_what_counts_as_a_use() -> None:
    """Copies and looks at the shape are none; every reader of the output, of a copy, or of the weight is one."""
    conv = nn.Conv2d(3, 4, 1)
    model = nn.Sequential(conv)
    recorder = Recorder(model)
    out = recorder.call_module(conv, (recorder.make_input(model),), {})
    copy = recorder.call_function("clone", (out,), {})
    recorder.call_function("size", (out, 1), {})
    assert (copy.parts, recorder.operator_uses["0"]) == (out.parts, 0)
    recorder.call_function("relu", (copy,), {})
    recorder.use([conv.weight])
    assert recorder.operator_uses["0"] == 2


@pytest.mark.parametrize("name", ["identity", "dropout", "add", "clone"])
def test_a_module_from_outside_torch_means_nothing_by_its_name(name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), type(name.title(), (nn.Conv2d,), {"forward": lambda _, x: x.relu()})(4, 4, 1)
    )
    recorder = Recorder(model)
    out = recorder.call_module(model[0], (recorder.make_input(model),), {})
    assert recorder.call_module(model[1], (out,), {}).parts == opaque(f"after {name}")
