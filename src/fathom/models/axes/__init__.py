"""What mechanisms and decoder parts are built on: base classes, the configuration's fields, layer passes,
arithmetic.

- `roles.py`: the base classes of mixers, residuals and recurrences, `Cost`, and the views SAME, DUO and ALL.
- `blend.py`: the options `blend` and `blend_steps`, and `shuffled` of mixers. `gates.py`: the parameters of
  `blend: learned`.
- `fields.py`: the keys of a configuration. `visit.py`: a layer in an iteration, and an iteration's output.
- `numerics.py`: sums and precision. `replaceable.py`: the table of kernels. `host.py`: numbers that a CPU reads from an
  accelerator. `cache_name.py`: transformers' cache argument.
"""
