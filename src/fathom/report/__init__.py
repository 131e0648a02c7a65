"""Building blocks of reports: HTML, plots, tables, statistics, provenance, progress, files."""

REPORT, PAGE = "report.json", "report.html"
"""File names of the report of a comparison, a ladder, an evaluation or a lineage comparison."""
