"""Residuals, which decide how a layer's output reaches later layers.

    attention_residuals.py      softmax over earlier blocks: `block_sum`, `snapshot`, `delta`, `delta_block`
    normed_pooling.py           its variant `inkling2`
    hyper_connections.py        several residual streams: the paper's form, and the options
    released_streams.py         their forms in released models
    denseformer.py, mudd.py     weighted sums of earlier layers' outputs, with fixed weights or a token's own
    branch_gain.py              the control: a learned gain on every sub-layer's output

A state starts over with each iteration of a loop, from the iteration's input (`begin`, called by `trips/walk.py`).
`axes/roles.py` has the base class and the option `per_visit`, by which `registry.py` (`add_residuals`) gives each
iteration its own parameters. `axes/blend.py` has `blend`.
"""
