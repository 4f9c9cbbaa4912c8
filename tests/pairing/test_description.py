"""The expressions themselves: how sums and concatenations are kept flat, and how wide they are."""

import pytest

from crossbn.pairing.description import Concatenation, Description, Opaque, Operator, Sum, add, concatenate, width

A = Operator("a", 4, 4)
B = Operator("b", 4, 4)
WIDE = Operator("wide", 6, 4)
LINEAR = Operator("linear", 4, 2)
KNOWN = Opaque("after relu", 4)
UNKNOWN = Opaque("input of the model")


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ([A, B], Sum((A, B))),
        ([Sum((A, B)), KNOWN], Sum((A, B, KNOWN))),
        ([UNKNOWN, A], Sum((UNKNOWN, A))),
        ([KNOWN, UNKNOWN], Opaque("after add", 4)),
        ([A, WIDE], Opaque("after add with broadcast channels", 6)),
        ([A, A], Opaque("after add", 4)),
        ([Sum((A, B)), A], Sum((Opaque("a more than once", 4), B, Opaque("a more than once", 4)))),
        ([WIDE, Concatenation((Opaque("x", 2), A))], Sum((WIDE, Opaque("after cat", 6)))),
    ],
)
def test_sums_are_flat(operands: list[Description], expected: Description) -> None:
    assert add(operands) == expected


@pytest.mark.parametrize(
    ("operands", "dim", "expected"),
    [
        ([A, B], 1, Concatenation((A, B))),
        ([A, UNKNOWN], -3, Concatenation((A, UNKNOWN))),
        ([LINEAR, UNKNOWN], -1, Concatenation((LINEAR, UNKNOWN))),
        ([Concatenation((A, B)), Sum((A, WIDE))], 1, Concatenation((A, B, Sum((A, WIDE))))),
        ([A], 1, A),
        ([A, B], 0, Opaque("after cat along dimension 0")),
        ([A, B], -1, Opaque("after cat along dimension -1")),
        ([A, LINEAR], -3, Opaque("after cat along dimension -3")),
        ([KNOWN, UNKNOWN], -3, Opaque("after cat along dimension -3")),
    ],
)
def test_concatenations_are_flat_and_along_channels(
    operands: list[Description], dim: int, expected: Description
) -> None:
    assert concatenate(operands, dim) == expected


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (A, 4),
        (UNKNOWN, None),
        (Sum((UNKNOWN, A)), 4),
        (Concatenation((A, Sum((WIDE, UNKNOWN)))), 10),
        (Concatenation((A, UNKNOWN)), None),
    ],
)
def test_width(description: Description, expected: int | None) -> None:
    assert width(description) == expected
