"""Evaluation of compressed caches: loss by position, needle retrieval, spectra, bytes and time."""
