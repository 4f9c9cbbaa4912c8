"""The mathematics of cross-iteration batch normalization: tensors in, tensors out, no state."""

from crossbn.functional.dependence import Dependence, Jacobian
from crossbn.functional.geometry import (
    LINEAR_OPERATORS,
    Geometry,
    flatten_weight,
    geometry_of,
    is_linear_operator,
    unflatten_weight,
)
from crossbn.functional.moments import Flag, accumulation_dtype, all_finite, batch_moments, channelwise, join_moments
from crossbn.functional.normalize import Gradients, differentiable_output, gradients, normalized
from crossbn.functional.plan import Plan, choose_plan
from crossbn.functional.pooling import Pooled, StepWeights, ages, pool, weights_by_age
from crossbn.functional.sensitivity import Places, mean_grad, outputs_at, patches_at, sample_places, var_grad
from crossbn.functional.settings import Settings
from crossbn.functional.storage import (
    BY_AGE,
    SAMPLES,
    GradientStorage,
    LookBack,
    Observation,
    Operand,
    PatchStorage,
    Storage,
    history_shapes,
    make_storage,
    stored_as,
    total,
)
from crossbn.functional.taylor import (
    TaylorTerms,
    compensate,
    project,
    project_means,
    project_steps,
    project_var,
    spread,
)
from crossbn.functional.weighting import averaged, best_weights, fit_line, squared_differences

__all__ = [
    "BY_AGE",
    "LINEAR_OPERATORS",
    "SAMPLES",
    "Dependence",
    "Flag",
    "Geometry",
    "GradientStorage",
    "Gradients",
    "Jacobian",
    "LookBack",
    "Observation",
    "Operand",
    "PatchStorage",
    "Places",
    "Plan",
    "Pooled",
    "Settings",
    "StepWeights",
    "Storage",
    "TaylorTerms",
    "accumulation_dtype",
    "ages",
    "all_finite",
    "averaged",
    "batch_moments",
    "best_weights",
    "channelwise",
    "choose_plan",
    "compensate",
    "differentiable_output",
    "fit_line",
    "flatten_weight",
    "geometry_of",
    "gradients",
    "history_shapes",
    "is_linear_operator",
    "join_moments",
    "make_storage",
    "mean_grad",
    "normalized",
    "outputs_at",
    "patches_at",
    "pool",
    "project",
    "project_means",
    "project_steps",
    "project_var",
    "sample_places",
    "spread",
    "squared_differences",
    "stored_as",
    "total",
    "unflatten_weight",
    "var_grad",
    "weights_by_age",
]
