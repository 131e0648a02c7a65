"""Using a trained model: generate, and serve."""
