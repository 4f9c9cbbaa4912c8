"""The kernels that `triton.py` launches: what a step does beside products of matrices and torch's own kernels.

Statistics are float32; inputs and weights may be narrower. R remembered steps, M rows of each (the mean patch, then
samples), C channels, I numbers of a patch; arrays are dense but for inputs, which come with their strides. Numbers
that differ from layer to layer are arguments, so that few variants are compiled; `num_steps` is read on the device.
"""

from crossbn.ops.kernels.backward import backward_vectors, row_coefficients, weight_gradient
from crossbn.ops.kernels.pooling import pool
from crossbn.ops.kernels.remembering import move_running, remember
from crossbn.ops.kernels.sampling import GEOMETRY, differentiate, gather
