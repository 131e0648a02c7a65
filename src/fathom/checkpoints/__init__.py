"""Model directories, Fathom's and others': checked without trust, opened, and written."""
