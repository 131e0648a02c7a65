"""Families whose own layers stand in our walk."""
