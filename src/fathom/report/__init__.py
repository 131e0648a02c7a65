"""Building blocks of reports: HTML, plots, tables, statistics, provenance, progress, files.

The pages themselves are in files named `*_page.py` in `experiments/` (`run_page.py` is `fathom report`), `evaluation/`
and `deepen/`, in `lens/page.py`, `evaluation/caches/page.py` and `training/probe.py`, and in `lineage/publishing/`.
"""

REPORT, PAGE = "report.json", "report.html"
"""File names of the report of a comparison, a ladder, an evaluation or a lineage comparison."""
