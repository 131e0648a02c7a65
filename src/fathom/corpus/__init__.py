"""Documents to clean, deduplicated, decontaminated, mixed collections of tokens, each step accounted for."""
