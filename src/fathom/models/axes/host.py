"""Copy numbers from the accelerator to CPU memory. Each read waits for the device, so all of them go through this
function.

If tokens halt, the host needs the number of continuing tokens to size the next iteration: one read per iteration, in
decoding and with `skip_dead_rows` (`TokenSubset` in `trips/slots.py`). Experts cost one read in each layer
(`decoder/experts.py`), packed documents one for each kind of mask, in transformers. A training step reads nothing else
by default.
"""

from __future__ import annotations

from torch import Tensor


def to_host(x: Tensor) -> list:
    """A tensor's numbers as nested lists, once the device has computed them."""
    return x.tolist()
