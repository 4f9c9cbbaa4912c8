"""The mathematics of cross-iteration batch normalization: tensors in, tensors out, no state."""

from crossbn.functional import library, native
from crossbn.functional.double_backward import Followed, Operand
from crossbn.functional.geometry import (
    LINEAR_OPERATORS,
    Geometry,
    flatten_weight,
    geometry_of,
    is_linear_operator,
    unflatten_weight,
)
from crossbn.functional.jacobian import Jacobian, follow_weight
from crossbn.functional.moments import accumulation_dtype, all_finite, batch_moments, join_moments
from crossbn.functional.normalize import Context, normalize, normalize_step
from crossbn.functional.plan import Plan, choose_plan
from crossbn.functional.pooling import Pooled, equal_votes, pool, votes_by_age
from crossbn.functional.sensitivity import Places, mean_grad, outputs_at, patches_at, sample_places, var_grad
from crossbn.functional.site import Site
from crossbn.functional.taylor import compensate, project, project_means, project_steps, project_var, spread

__all__ = [
    "LINEAR_OPERATORS",
    "Context",
    "Followed",
    "Geometry",
    "Jacobian",
    "Operand",
    "Places",
    "Plan",
    "Pooled",
    "Site",
    "accumulation_dtype",
    "all_finite",
    "batch_moments",
    "choose_plan",
    "compensate",
    "equal_votes",
    "flatten_weight",
    "follow_weight",
    "geometry_of",
    "is_linear_operator",
    "join_moments",
    "library",
    "mean_grad",
    "native",
    "normalize",
    "normalize_step",
    "outputs_at",
    "patches_at",
    "pool",
    "project",
    "project_means",
    "project_steps",
    "project_var",
    "sample_places",
    "spread",
    "unflatten_weight",
    "var_grad",
    "votes_by_age",
]
