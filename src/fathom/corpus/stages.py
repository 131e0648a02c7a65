"""All stages in their order."""

from __future__ import annotations

from typing import Any

from fathom.corpus.clean import Clean
from fathom.corpus.contamination import Benchmarks, Contamination, Flags
from fathom.corpus.converse import Converse
from fathom.corpus.duplicates import Candidates, Duplicates, Exact, Signatures, Verify
from fathom.corpus.exports import Export
from fathom.corpus.ingest import Ingest
from fathom.corpus.plain import Encode, Read
from fathom.corpus.planting import Plant
from fathom.corpus.search import Search
from fathom.corpus.stage import Stage, StageOf
from fathom.corpus.tokens import Tokenize, Tokenizer

ORDER: tuple[type[Stage], ...] = (
    *(Ingest, Clean, Signatures, Exact, Candidates, Verify, Duplicates),
    *(Benchmarks, Contamination, Flags, Tokenizer, Tokenize, Converse, Export),
)
PREPARE: tuple[type[StageOf[Any]], ...] = (Read, Encode)
"""The stages of `fathom prepare`."""
AUDIT: tuple[type[StageOf[Any]], ...] = (Ingest, Benchmarks, Search, Plant)
"""The stages of `fathom corpus audit`."""
STAGES: dict[str, type[StageOf[Any]]] = {stage.name: stage for stage in (*ORDER, *PREPARE, *AUDIT)}
