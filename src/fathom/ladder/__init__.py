"""Many sizes: how much more compute the control would need to match an arm, and whether that grows with size."""
