"""Run a decoder's layers in one or more iterations: which layers run, what each reads and stores, and caches for it.

    slots.py                            the plan of layers and iterations; `sweep`, which runs them; Jacobi rounds
    walk.py                             the passes: what each iteration reads and stores, with and without a cache
    protocols.py                        what these files need of a model
    reading.py, flex_reading.py         the masks: which (token, iteration) an iteration may read
    slot_cache.py                       the cache of all iterations, which refuses a cache that another model filled
    slot_table.py, fixed_table.py       where this cache stores what; fixed positions for compiled decoding
    speculation.py, engines.py          self-speculative decoding; inference engines with a cache of their own

`../modeling.py` (`trips_asked`) refuses more iterations than the model was trained for.

`slots.py` also keeps the results of halted tokens (`TokenSubset.put`) and finds a mixer's sources in other iterations.
`slot_table.py` decides when the slots that are read are copied, and `walk.py` which attention backends are refused.
"""
