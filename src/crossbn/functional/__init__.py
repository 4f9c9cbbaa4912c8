"""The mathematics of cross-iteration batch normalization: tensors in, tensors out, no state."""

from crossbn.functional.geometry import (
    LINEAR_OPERATORS,
    Geometry,
    flatten_weight,
    geometry_of,
    is_linear_operator,
    unflatten_weight,
)
from crossbn.functional.moments import accumulation_dtype, batch_moments, join_moments
from crossbn.functional.normalize import follow_weight, normalize
from crossbn.functional.pooling import Pooled, pool
from crossbn.functional.sensitivity import (
    all_positions,
    choose_amount,
    mean_grad,
    outputs_at,
    patches_at,
    sample_positions,
    sampled_var_grad,
    var_grad,
)
from crossbn.functional.taylor import compensate, project_mean, project_samples, project_var

__all__ = [
    "LINEAR_OPERATORS",
    "Geometry",
    "Pooled",
    "accumulation_dtype",
    "all_positions",
    "batch_moments",
    "choose_amount",
    "compensate",
    "flatten_weight",
    "follow_weight",
    "geometry_of",
    "is_linear_operator",
    "join_moments",
    "mean_grad",
    "normalize",
    "outputs_at",
    "patches_at",
    "pool",
    "project_mean",
    "project_samples",
    "project_var",
    "sample_positions",
    "sampled_var_grad",
    "unflatten_weight",
    "var_grad",
]
