"""How many documents of a corpus were read, left out and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REASONS = ("too_long", "no_target", "no_template")
"""Why a conversation is rejected (`converse.py`)."""


def conversations_left(converse: Mapping[str, int]) -> int:
    """How many conversations the stage `converse` kept."""
    return converse.get("conversations", 0) - sum(converse.get(reason, 0) for reason in REASONS)


@dataclass
class CorpusCounts:
    """How many documents of a corpus were read, how many were left out for which reason, and what remains."""

    read: int
    unreadable: int
    filtered: int
    duplicate: int
    dropped: int
    cut: int
    tokens: int
    conversations: int
    rejected: int = 0
    """Conversations that are too long, without anything to train on, or refused by the template."""

    @classmethod
    def of(cls, stages: Mapping[str, Mapping[str, int]]) -> CorpusCounts:
        """The counts of a corpus, computed from the counts of each stage."""
        found = {name: stages.get(name, {}) for name in ("ingest", "clean", "duplicates", "contamination", "tokenize")}
        read, readable = (found["ingest"].get(key, 0) for key in ("documents", "ok"))
        return cls(
            read=read,
            unreadable=read - readable,
            filtered=readable - found["clean"].get("kept", 0),
            duplicate=found["duplicates"].get("removed", 0),
            dropped=found["contamination"].get("dropped", 0),
            cut=found["contamination"].get("cut", 0),
            tokens=found["tokenize"].get("tokens", 0),
            conversations=conversations_left(stages.get("converse", {})),
            rejected=sum(stages.get("converse", {}).get(reason, 0) for reason in REASONS),
        )

    def __str__(self) -> str:
        """The contents of the corpus in a sentence."""
        counts = {
            "unreadable": self.unreadable,
            "filtered out": self.filtered,
            "duplicates": self.duplicate,
            "dropped as contaminated": self.dropped,
            "cut for the same reason": self.cut,
            "rejected as conversations": self.rejected,
        }
        left = [f"{count:,} {words}" for words, count in counts.items() if count]
        talk = [f"{self.conversations:,} conversations"] if self.conversations else []
        kept = " and ".join([f"{self.tokens:,} tokens", *talk] if self.tokens or not talk else talk)
        return f"Of {self.read:,} documents read: {', '.join(left) or 'none dropped'}. {kept} remain."
