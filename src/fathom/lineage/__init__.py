"""Whose weights are these? AWM and HuRef, repaired, with tests that have real p-values. Weights only.

from fathom.lineage import compare, open_weights

found = compare(open_weights("org/suspect"), open_weights("org/base"), controls=["org/unrelated"])
print(found.verdict.sentence)
"""

from fathom.checkpoints.origin import Refused
from fathom.lineage.comparison import Comparison, Options, compare
from fathom.lineage.weights import Weights, open_weights

__all__ = ["Comparison", "Options", "Refused", "Weights", "compare", "open_weights"]
