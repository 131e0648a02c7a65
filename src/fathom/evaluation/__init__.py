"""What a model is worth: perplexity, lm-eval's tasks, paired differences, caches."""
