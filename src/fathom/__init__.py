"""Fathom: decoder language models whose depth does more work."""

from fathom._version import __version__

__all__ = ["__version__"]
