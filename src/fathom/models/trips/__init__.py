"""Run a decoder's layers in one or more iterations: which layers run, what each reads and stores, and caches for it."""
