"""Turns documents into cleaned, deduplicated, decontaminated and mixed token shards, with a report on every step."""
