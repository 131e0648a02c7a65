"""Directories of weights, ours and others': read without trust, opened, and written."""
