"""What every page and table is made of: HTML, plots, statistics, provenance, progress, files."""
