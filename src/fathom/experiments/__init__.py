"""Paired experiments over several seeds: comparisons of arms at one model size, ladders of sizes, and their reports.

compare.py          runs a comparison; `plan.py` is its plan, and `arms.py` its arms and equal budgets
differences.py      computes a comparison's numbers and verdict; `contrasts.py` sums of several arms' losses
compare_page.py     shows them; `compare_results.py` is the schema of the report
timing.py           measures step time, memory and cache
schedule.py         runs tasks and writes `failed.json`; `task_claims.py` claims them, `team.py` counts the workers
ladder.py           runs a ladder; `rungs.py` decides sizes and recipes, by the keys of `ladder_rules.py`
stages.py           the next runs, learning rates and the sealed prediction; `tuning.py` finds an optimum
multipliers.py      computes a ladder's numbers and verdict; `scaling.py` fits the law, `trips.py` φ
acquisition.py      judges a ladder on a puzzle
ladder_page.py      shows a ladder; `ladder_results.py` is the schema of the report
budget.py           the dry runs; `simulation.py` predicts intervals
paper.py            a paper's table and its dry run; `paper_table.py` makes it
run_page.py         the page of one run; `catalogue.py` the table of mechanisms
"""
