"""Which linear operators feed each batch norm of a model, and why not: read-only.

Two front ends run a model's forward and report every call to a `Recorder`: `tracing.py` without data, by torch.fx, and
`watching.py` on an example input. The recorder (`dataflow.py`) keeps a `Value` for every tensor, which says what the
tensor is made of; `vocabulary.py` knows what torch's functions and modules do. `find.py` turns what reached each norm
into the public records. `untouched.py` guards the model while its code runs.
"""

from crossbn.pairing.find import Pairing, Segment, find_pairs

__all__ = ["Pairing", "Segment", "find_pairs"]
