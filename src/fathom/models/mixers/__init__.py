"""Mixers: which value attention stores and reads."""
