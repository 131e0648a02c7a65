"""Are two models related? AWM and HuRef, repaired, with tests that have real p-values, from weights alone.

from fathom.lineage import compare, open_weights

found = compare(open_weights("org/suspect"), open_weights("org/base"), controls=["org/unrelated"])
print(found.verdict.sentence)

Names and modules are imported on first use, so that the command line can be parsed without scipy. No module of this
package imports torch, and no model is run.

    comparison.py   measures a pair and its controls: modes, samples by the nonce, refused controls, HuRef's scores
    verdict.py      the label, the reasons and the exit code; Holm's correction
    evidence.py     the p-values of T1 to T6, and which score counts as high
    identity.py     identical tensors
    weights.py      opens a model and reads its tensors by role; `layouts.py` has their names
    canonical.py    removes what can vary without changing the function; `heads.py` finds heads without effect
    vocabulary.py   the strings of a tokenizer
    aligning.py     maps the channels of one model to those of the other; with `pairs.py`, when T1 and T2 are run
    awm.py          AWM's scores, channel matchings (ties, zero rows), matching of layers
    huref.py        HuRef's terms and scores, and the sketch of a model
    neurons.py      T4: frames (`blind.py`: blind), merged neurons, experts; `value_channels.py` T5, `planes.py` T6
    starts.py       weights that start from a formula
    inherited.py    the share of trained directions that both models have
    signs.py        signs of tampering
    nulls.py        scores of unrelated models, and null files; `pairs.py` all numbers of one pair
    ancestry.py     `layers`; also `direction.py`, `shares.py`, `tree.py` (with `distances.py`) and `attacks.py`
    publishing      reports and pages, portraits, cards, `identify`, commitments and `verify`
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fathom.errors import ModelError
    from fathom.lineage import ancestry as ancestry
    from fathom.lineage import attacks as attacks
    from fathom.lineage import comparison as comparison
    from fathom.lineage import direction as direction
    from fathom.lineage import evidence as evidence
    from fathom.lineage import nulls as nulls
    from fathom.lineage import publishing as publishing
    from fathom.lineage import shares as shares
    from fathom.lineage import tree as tree
    from fathom.lineage.comparison import Comparison, Options, compare
    from fathom.lineage.weights import Weights, open_weights

__all__ = ["Comparison", "ModelError", "Options", "Weights", "compare", "open_weights"]

# the module of each name
_HOMES = {
    "Comparison": "fathom.lineage.comparison",
    "Options": "fathom.lineage.comparison",
    "ModelError": "fathom.checkpoints.origin",
    "Weights": "fathom.lineage.weights",
    "compare": "fathom.lineage.comparison",
    "open_weights": "fathom.lineage.weights",
}
_MODULES = {"ancestry", "attacks", "comparison", "direction", "evidence", "nulls", "publishing"}
_MODULES |= {"shares", "tree"}

if not TYPE_CHECKING:  # a type checker would otherwise accept every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its module, or a module of this package, on first access (PEP 562)."""
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'fathom.lineage' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
