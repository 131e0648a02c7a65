"""Evaluation of models: perplexity, lm-eval's tasks, paired differences, caches."""
