"""Model families whose layers Fathom runs as transformers' own modules ("hosted" layers)."""
