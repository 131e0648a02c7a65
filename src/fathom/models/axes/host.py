"""Copy numbers from the accelerator to CPU memory. Each read waits for the device, so all of them go through this
function.

If tokens halt, the host needs the number of continuing tokens to size the next iteration: one read per iteration, in
decoding and with `skip_dead_rows`. The callers are in `trips/slots.py` and `trips/slot_table.py`. Packed documents cost
one read per forward pass, in transformers' mask functions. By default a training step reads nothing
(`training/build.py`).
"""

from __future__ import annotations

from torch import Tensor


def to_host(x: Tensor) -> list:
    """A tensor's numbers as nested lists, once the device has computed them."""
    return x.tolist()
