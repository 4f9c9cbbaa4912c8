"""The names of the norms, for those who do not wait for torch."""

NORM_NAMES = ("bn", "sync_bn", "frozen_bn", "in", "ln", "gn", "brn", "bin", "kn", "sn", "ssn", "naive_cbn", "cbn")
"""The keys of `crossbn.nn.NORMS`, whose import takes torch's seconds."""
CROSS_ITERATION = ("cbn", "naive_cbn")
"""Those that have a window."""
