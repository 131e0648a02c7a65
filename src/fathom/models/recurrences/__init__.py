"""Recurrences: how many trips a token makes, and what each starts from."""
