"""Inspect what a model computes for a text, and show it as an HTML page."""
