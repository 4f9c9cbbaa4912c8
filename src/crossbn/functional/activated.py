r"""How the moments of an activated output change with the weights before the activation.

With `z = W * y + b`, `x = act(z)`, `patch` the inputs that one output position reads and `slope = act'(z)`:

| here | formula | shape |
|---|---|---|
| `mean_grad` | E[slope patch], another one for every channel | [C, I] |
| `var_grad` | 2 E[(x - mean) slope patch] | [C, I] |

The averages are over the sampled positions. The outputs there are made once more from patches and weights: nothing has
to be kept for it, and an activation that works in place makes no difference. A bias does not just shift the mean here:
it is one more weight, whose input is 1.
"""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor

from crossbn.functional.activations import Activation
from crossbn.functional.geometry import Geometry
from crossbn.functional.moments import Flag
from crossbn.functional.sensitivity import outputs_at, patches_at, sample_places
from crossbn.functional.settings import Settings
from crossbn.functional.storage import GradientStorage, Observation, agree, choose_plan
from crossbn.functional.taylor import project, spread


@functools.lru_cache(4096)
def geometry_of_rows(geometry: Geometry, has_bias: bool) -> Geometry:
    """Return the shape of an operator that has the same weights, and the bias, as one row for each channel."""
    channels = geometry.out_channels
    return Geometry(channels, channels * (geometry.patch_size + has_bias), channels)


class ActivatedStorage(GradientStorage):
    """Keeps the gradients of mean and variance of one operator that an activation follows, both of the weight's size.

    All channels have a mean gradient of their own, as if each were a group.
    """

    def __init__(self, geometry: Geometry, has_bias: bool, activation: Activation, settings: Settings) -> None:
        plan = choose_plan(geometry, settings.positions, settings.window - 1)
        super().__init__([geometry_of_rows(geometry, has_bias)], plan.positions, settings)
        self.activation = activation

    def remember(self, seen: Observation) -> tuple[dict[str, Tensor], Flag]:
        """Return what to keep of today, and whether the output is what activation and weights make of the inputs."""
        x, ((geometry, _, y, sizes, _),), (weight,) = seen.x, seen.operands, seen.weights
        assert y is not None
        places = sample_places(len(x), x.shape[2:].numel(), self.positions, seen.phase, x.device)
        patches, output = patches_at(y, geometry, places, sizes), outputs_at(x, places)
        if patches.shape[2] < weight.shape[1]:
            patches = F.pad(patches, (0, 1), value=1.0)  # what the bias reads
        z, centred = project(patches, weight), output - seen.mean
        slope = self.activation.slope(z) * ((1 if seen.local is None else seen.local) / len(z))
        grads = {"0.mean_grad": spread(slope, patches), "0.var_grad": spread(2 * centred * slope, patches)}
        is_theirs = not seen.is_whole or agree(
            self.activation(z) - output, seen.var + centred.square(), lambda: project(patches.abs(), weight.abs()), x
        )
        return self._with_products(grads, seen.weights), is_theirs
