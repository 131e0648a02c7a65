"""Paired experiments over several seeds: comparisons of arms at one model size, ladders of sizes, and their reports."""
