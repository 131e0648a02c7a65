"""Evaluation of models: perplexity, lm-eval's tasks, paired differences, caches.

- `scoring.py`: `fathom evaluate`; limits (`--max-trips`), caches (`--kvcache`), stored results (`--out`), failed tasks.
- `tasks.py`: names of tasks; their documents, splits and few-shot examples in `--task-data`; `choice:` and `cloze:`.
- `harness.py`: runs lm-eval; batch size; which metrics are paired; few-shot prompts without examples are refused.
- `perplexity.py`: texts, domains, windows, the start token, loss by context; a sample that is also decoded.
- `paired.py`: differences, intervals, clusters, `skewed`. `scores_page.py`: tables. `results.py`: `report.json`.
- `samples.py`: `fathom evaluate samples`. `deepened.py`: `fathom evaluate deepened`.
- `tuned.py`, `tuned_page.py`, `tuned_origin.py`: `fathom evaluate tuned`. `caches/`: `fathom evaluate caches`.
- `clock.py`: time on a device.
"""
