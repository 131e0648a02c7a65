"""Publishing models and comparisons: reports and pages, portraits, cards, commitments and their verification.

The modules of evidence do not import this package. Modules are imported on first use.

    report.py           a report's content: hashes, options, command line; `results.py` its classes, `page.py` its page
    verification.py     `verify` of a report; `commitments.py` has that of a commitment
    commitments.py      `commit`: leaves, root, secret key; also the SHA-256 of a model's files
    portrait.py         the picture and its six words
    cards.py            cards and their search; `identification.py` has `identify`
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fathom.lineage.publishing import cards as cards
    from fathom.lineage.publishing import commitments as commitments
    from fathom.lineage.publishing import identification as identification
    from fathom.lineage.publishing import page as page
    from fathom.lineage.publishing import portrait as portrait
    from fathom.lineage.publishing import report as report
    from fathom.lineage.publishing import verification as verification

__all__ = ["cards", "commitments", "identification", "page", "portrait", "report", "verification"]

if not TYPE_CHECKING:  # a type checker would otherwise accept every misspelt name

    def __getattr__(name: str) -> object:
        """Import a module of this package on first access (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module 'fathom.lineage.publishing' has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")
