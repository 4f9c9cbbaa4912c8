"""Closed-form sensitivities of the moments against autograd."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from crossbn import functional as C
from tests.nn.test_oracle import OPERATORS
from tests.support import functional_form


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_the_moments(name: str) -> None:
    make, shape = OPERATORS[name]
    torch.manual_seed(0)
    module = make().double()
    geometry, operator = C.geometry_of(module), functional_form(module)
    y = torch.randn(3, *shape, dtype=torch.float64) + 0.5
    weight = module.get_parameter("weight").detach()

    def mean_and_var(w: Tensor) -> tuple[Tensor, Tensor]:
        flat = operator(y, w).movedim(1, 0).flatten(1)
        return flat.mean(1), flat.var(1, correction=0)

    mean_jacobian, var_jacobian = torch.func.jacrev(mean_and_var)(weight)
    x = operator(y, weight)
    mean, _ = C.batch_moments(x)
    channels = range(geometry.out_channels)
    flat_mean = torch.stack([C.flatten_weight(mean_jacobian[j], geometry)[j] for j in channels])
    flat_var = torch.stack([C.flatten_weight(var_jacobian[j], geometry)[j] for j in channels])
    flat = C.flatten_weight(weight, geometry)
    shared = C.mean_grad(y, geometry, x.shape[2:]).repeat_interleave(geometry.out_channels // geometry.groups, 0)
    torch.testing.assert_close(shared, flat_mean, rtol=1e-10, atol=1e-12)
    # The variance's gradient at fixed mean is that of the second moment less 2 mean d(mean): the total is the same.
    torch.testing.assert_close(C.var_grad(x, mean, y, flat, geometry), flat_var, rtol=1e-9, atol=1e-11)
    everywhere = C.sample_places(len(x), x.shape[2:].numel(), None, 0, x.device)
    centred = (C.outputs_at(x, everywhere) - mean) * (2 * x.shape[1] / x.numel())
    patches = C.patches_at(y, geometry, everywhere, x.shape[2:])
    torch.testing.assert_close(C.spread(centred, patches), flat_var, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(C.project(patches, flat), C.outputs_at(x, everywhere), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(C.unflatten_weight(flat, geometry), weight, rtol=0, atol=0)


@pytest.mark.parametrize(("batch", "space"), [(1, 7), (4, 15), (61, 1)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_position_is_visited_equally_often(batch: int, space: int, as_tensor: bool) -> None:
    counts = torch.zeros(batch, space)
    for step in range(batch * space):
        places = C.sample_places(batch, space, 5, torch.tensor(step) if as_tensor else step, counts.device)
        assert len({*zip(*(each.tolist() for each in places), strict=True)}) == 5
        counts.index_put_(tuple(places), torch.ones(5), accumulate=True)
    assert torch.equal(counts, torch.full((batch, space), 5.0))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_mean_patch_of_large_maps(mode: Literal["zeros", "reflect", "replicate", "circular"], stride: int) -> None:
    """It is the mean of the patches, though none is made."""
    conv = torch.nn.Conv2d(4, 6, (3, 5), stride=stride, padding=(1, 2), dilation=(2, 1), groups=2, padding_mode=mode)
    geometry = C.geometry_of(conv)
    y = torch.randn(2, 4, 32, 40, dtype=torch.float64)
    sizes = conv.float()(y.float()).shape[2:]
    patches = C.patches_at(y, geometry, C.sample_places(2, sizes.numel(), None, 0, y.device), sizes)
    torch.testing.assert_close(C.mean_grad(y, geometry, sizes), patches.mean(0), rtol=0, atol=1e-13)
