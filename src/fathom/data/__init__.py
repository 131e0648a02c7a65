"""From text to batches: checksummed token shards, and batches that are a pure function of the step."""
