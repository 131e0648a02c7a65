"""Inspect what a model computes for a text, and show it as an HTML page.

- `look.py`: computes weights, origins, predictions after every layer, and surprisal.
- `page.py`: rounds and packs the numbers into one HTML file. `lens.html.j2`: its text.
- `lens.js`: draws it; *settled*, *borrowed*, keys and clicks, B − A, the field to type into.
- `live.py`, `place.py`: the lens of `fathom serve --lens`.
"""
