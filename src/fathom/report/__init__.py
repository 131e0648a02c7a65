"""Building blocks of reports: HTML, plots, tables, statistics, provenance, progress, files.

The pages themselves are elsewhere: `experiments/run_page.py` is `fathom report`, `experiments/compare_page.py` and
`ladder_page.py` are those of comparisons and ladders, `evaluation/scores_page.py` and `pair_page.py` those of `fathom
evaluate`, `lens/page.py` is the lens.
"""

REPORT, PAGE = "report.json", "report.html"
"""File names of the report of a comparison, a ladder, an evaluation or a lineage comparison."""
