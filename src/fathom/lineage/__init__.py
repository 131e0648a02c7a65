"""Whose weights are these? AWM and HuRef, repaired, with tests that have real p-values. Weights only.

from fathom.lineage import compare, open_model

found = compare(open_model("org/suspect"), open_model("org/base"), controls=["org/unrelated"])
print(found.verdict.sentence)
"""

from fathom.checkpoints.origin import Refused
from fathom.lineage.comparison import Comparison, Options, compare
from fathom.lineage.weights import Weights, open_model

__all__ = ["Comparison", "Options", "Refused", "Weights", "compare", "open_model"]
