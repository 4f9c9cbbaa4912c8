"""The mathematics of cross-iteration batch normalization: tensors in, tensors out, no state."""

from crossbn.functional.activations import ActivatedStorage, Activation, geometry_of_rows
from crossbn.functional.carrying import Carried, after_norm, move_inputs, share_inside, side_by_side
from crossbn.functional.geometry import (
    LINEAR_OPERATORS,
    Geometry,
    flatten_weight,
    geometry_of,
    is_linear_operator,
    unflatten_weight,
)
from crossbn.functional.moments import Flag, accumulation_dtype, all_finite, batch_moments, channelwise, join_moments
from crossbn.functional.normalize import Gradients, gradient_sums, gradients, input_gradient, normalized
from crossbn.functional.pooling import (
    Latest,
    Pooled,
    StepWeights,
    ages,
    belief_weight,
    blend,
    drifted,
    growth_of,
    pool,
    weights_by_age,
)
from crossbn.functional.sensitivity import mean_grad, outputs_at, patches_at, sample_places, var_grad
from crossbn.functional.settings import Settings
from crossbn.functional.storage import (
    BY_AGE,
    SAMPLES,
    GradientStorage,
    LookBack,
    Observation,
    Operand,
    PatchStorage,
    Plan,
    Storage,
    choose_plan,
    history_shapes,
    make_storage,
    stored_as,
    total,
)
from crossbn.functional.taylor import (
    Dependence,
    Jacobian,
    TaylorTerms,
    compensate,
    project,
    project_means,
    project_steps,
    spread,
)
from crossbn.functional.weighting import averaged, best_weights, fit_line, gradient_price, squared_differences
