"""Which linear operators feed each batch norm of a model, and why not: read-only.

Two front ends watch the calls a model makes and tell one `Ledger` about them:

    symbolic.py   traces the model without data          calls of torch.fx nodes
    watching.py   runs it once on an example input       calls of real tensors

The ledger (`ledger.py`) keeps a `Value` (`value.py`) for every tensor: an expression of what it is made of
(`description.py`) and who reads it. `calls.py` and `modules.py` know what torch's functions and modules mean.
`find.py` turns what reached each norm into the public records (`records.py`). `untouched.py` guards the model
while it is being looked at.
"""

from crossbn.pairing.find import find_pairs
from crossbn.pairing.records import Pairing, Segment

__all__ = ["Pairing", "Segment", "find_pairs"]
