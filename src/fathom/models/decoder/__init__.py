"""The parts of a backbone: norms, rotation, feed-forward, head and loss.

Norms and loss keep float64 (`axes/numerics.py`, `widen`). `rms_norm.py` and `rotary.py` have backward passes of their
own in eager training, `loss.py` in compiled code too. `modeling.py` has attention and decides when logits are returned.
"""
