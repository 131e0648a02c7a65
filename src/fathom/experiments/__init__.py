"""Paired experiments over several seeds: comparisons of arms at one model size, ladders of sizes, and their reports.

compare.py          runs a comparison; `plan.py` is its plan, and `arms.py` its arms and equal budgets
differences.py      computes a comparison's numbers and verdict; `contrasts.py` sums of several arms' losses
compare_page.py     shows a comparison; `compare_results.py` is the schema of its report
timing.py           measures step time, memory and cache
scheduler.py        runs tasks and writes `failed.json`; `task_claims.py` claims them, `workers.py` counts the workers
ladder.py           runs a ladder; `rungs.py` decides sizes and recipes, by the keys of `ladder_rules.py`
stages.py           decides the next runs and learning rates, seals the prediction; `tuning.py` finds an optimum
multipliers.py      computes a ladder's numbers and verdict; `scaling.py` fits the law, `iteration_worth.py` φ
acquisition.py      judges a ladder on a puzzle
ladder_page.py      shows a ladder; `ladder_results.py` is the schema of its report
dry_run.py          computes the dry runs; `simulation.py` predicts a ladder's intervals
paper.py            reads a paper's table and computes its dry run; `paper_table.py` makes the table
run_page.py         `fathom report`: the pages of runs; `catalogue.py` the table of `fathom mechanisms`
"""
