"""SparsestMax: a softmax that a growing radius makes choose.

Wenqi Shao, Tianjian Meng, Jingyu Li, Ruimao Zhang, Yudian Li, Xiaogang Wang, Ping Luo, "SSN: Learning Sparse Switchable
Normalization via SparsestMax", CVPR 2019, https://arxiv.org/abs/1903.03793; sparsemax: Andre Martins, Ramon
Astudillo, ICML 2016, https://arxiv.org/abs/1602.02068.

| paper | here | shape |
|---|---|---|
| z | `logits` | [K] |
| p | the ratios returned, of the simplex: none negative, together 1 | [K] |
| u | the simplex' centre, 1/K everywhere | [K] |
| r | `radius`: p keeps at least this distance from u | scalar |
"""

import math

import torch
from torch import Tensor


def circumradius(count: int) -> float:
    """Return the distance from the centre of the simplex of `count` ratios to its corners.

    Example:
        >>> round(circumradius(3), 3)
        0.816
    """
    return math.sqrt((count - 1) / count)


def sparsemax(logits: Tensor) -> Tensor:
    """Return the point of the simplex nearest to `logits` [K].

    Example:
        >>> sparsemax(torch.tensor([0.5, 0.25, -1.0]))
        tensor([0.6250, 0.3750, 0.0000])
    """
    logits = logits - logits.max().detach()  # the same point, and sums of large logits would swallow the 1
    ordered = logits.sort(descending=True).values
    sizes = torch.arange(1, len(logits) + 1, device=logits.device, dtype=logits.dtype)
    thresholds = (ordered.cumsum(0) - 1) / sizes
    support = (ordered > thresholds).sum()
    return (logits - thresholds.gather(0, (support - 1).reshape(1))).clamp(min=0)


def sparsest_max(logits: Tensor, radius: Tensor) -> Tensor:
    """Return the point nearest to `logits` [K] in the simplex outside a ball of `radius` around its centre.

    With radius 0 that is sparsemax; with the circumradius it is a corner, one ratio 1 and the others 0. Between,
    a point inside the ball is pushed to its surface, away from the centre; what leaves the simplex on the way
    is brought back to the face it left through, and pushed there, away from the face's centre. No value is read
    by Python, so a GPU does not wait.

    Where the logits tie, several points are nearest, and the one towards the first of the largest is taken.

    Example:
        >>> logits = torch.tensor([0.4, 0.35, 0.25])
        >>> [sparsest_max(logits, torch.tensor(radius)) for radius in (0.0, circumradius(3))]
        [tensor([0.4000, 0.3500, 0.2500]), tensor([1., 0., 0.])]
    """
    count = len(logits)
    ratios = sparsemax(logits)
    for _ in range(count - 1):
        face = (ratios > 0).to(ratios.dtype)
        centre = face / face.sum()
        # Centres of faces lie at right angles to them, so that Pythagoras gives the ball's radius within the face.
        left = radius.square() - (centre - 1 / count).square().sum()
        offset = _direction(ratios - centre, face, centre)
        distance = offset.square().sum().sqrt()
        pushed = centre + left.clamp(min=0).sqrt() * offset / distance
        inside = (ratios - centre).square().sum() < left
        ratios = torch.where(inside, sparsemax(pushed), ratios)
    # Rounding must not leave a corner with crumbs of the other ratios: what is chosen is chosen wholly.
    ratios = torch.where(ratios > 8 * torch.finfo(ratios.dtype).eps, ratios, 0)
    return ratios / ratios.sum()


def _direction(offset: Tensor, face: Tensor, centre: Tensor) -> Tensor:
    """Return `offset`, or where it is none the way to the face's first corner."""
    # The way from a corner, where there is none to go, is never taken: it only must not be 0.
    corner = torch.nn.functional.one_hot(face.argmax(), len(face)).to(face.dtype)
    way = torch.where(face.sum() > 1, corner - centre, torch.ones_like(centre))
    tied = offset.abs().max() <= 4 * torch.finfo(offset.dtype).eps
    return torch.where(tied, way, offset)
