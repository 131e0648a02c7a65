"""The walk: which visits are made, what each reads and stores, and the caches of slots."""
