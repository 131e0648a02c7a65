"""Mixers, which decide the value that attention stores and reads.

- `depth_attention.py`, `uniform_depth.py`, `value_residual.py`, `value_gain.py`: a mixer each.
- `source_layers.py`: `stride`, `recent_layers` and `across_trips` of the first two.
- `axes/blend.py`: `blend` and `shuffled` of the first three. `trips/slots.py` (`_sources`): the sources of a layer in
  an iteration. `registry.py` (`check_trips`): where `across_trips` is refused.
"""
