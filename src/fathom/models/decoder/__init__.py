"""The parts of a backbone: norms, rotation, feed-forward, head and loss."""
