"""Looking inside a model: what it computed, and the page that shows it."""
