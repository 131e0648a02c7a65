"""What every page and table is made of: HTML, plots, statistics, provenance, progress, files."""

REPORT, PAGE = "report.json", "report.html"
"""What a comparison, an evaluation and a lineage report end in."""
