"""Evaluation of compressed caches: loss by position, needle retrieval, spectra, bytes and time.

- `evaluate.py`: `fathom evaluate caches`, its estimate of tokens and time, and the parts stored in `--out`.
- `measure.py`: reads texts through a cache; loss, bytes, peak memory and speed. `spectrum.py`: kept frequencies.
- `needles.py`: needles of random tokens. `natural.py`: needles in sentences. `ruler.py`: RULER's tasks.
- `prompts.py`: the question before or after the last compression (*inside*, *outside*). `asking.py`: scores answers.
- `questions.py`: tasks that the full cache solves, differences to it. `page.py`: verdict, tables. `results.py`: fields.

LongBench is read by `../tasks.py`, and `fathom evaluate --kvcache` is `../scoring.py`.
"""
