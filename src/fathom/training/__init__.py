"""The training loop and what it stands on: parallelism, optimisers, checkpoints, tracking."""
