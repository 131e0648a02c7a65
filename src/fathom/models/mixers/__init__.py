"""Mixers, which decide the value that attention stores and reads."""
