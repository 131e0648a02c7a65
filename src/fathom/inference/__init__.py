"""Generate text with a trained model, and serve it."""
