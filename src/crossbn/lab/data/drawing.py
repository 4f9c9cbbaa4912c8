"""Which images are drawn, and with which random numbers: all of it follows from a few seeds."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """The images of one forward."""

    images: Tensor
    """Their numbers [N]."""
    seed: int
    """Of what is random in preparing them."""


def mix(*numbers: int) -> int:
    """Return a seed that numbers such as (seed, epoch, step) share with no others.

    Example:
        >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
        (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")


def permutation(size: int, *numbers: int) -> Tensor:
    """Return 0 to size - 1 in an order that `numbers` decide."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(mix(*numbers)))


def choose(size: int, count: int | None, skip: int = 0) -> Tensor:
    """Return the numbers of `count` of so many images, after `skip` of a permutation that is always the same.

    All of them, in their order, where that leaves out none.

    Example:
        >>> choose(3, None), len(choose(9, 4, skip=2))
        (tensor([0, 1, 2]), 4)
    """
    if not skip and (count is None or count >= size):
        return torch.arange(size)
    return permutation(size, 0)[skip:][:count]
