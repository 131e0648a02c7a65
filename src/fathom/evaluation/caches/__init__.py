"""What compressed caches keep: loss by distance, needles, spectra, bytes and time."""
