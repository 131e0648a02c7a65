"""Packed weights: the linear layers of a model served on a CPU keep their weights in the memory order that oneDNN uses.

A plain linear layer keeps its weight row by row, and MKL brings it into another order at each product of several rows,
which costs as much as the product. Here that is done once, and the packed weight is the only one that is kept. oneDNN
makes a program of half a megabyte for each number of rows, and keeps a thousand of them, so rows are multiplied in
blocks of few sizes.

`packed_or_plain.py` decides whether a server packs its weights: by `--layout`, or by measuring.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST = 64
"""Fewest outputs of a layer that is packed."""
MOST, BLOCK, GRAIN = 512, 64, 8
"""At most so many rows are one product. Of many, a multiple of BLOCK are one; the others are made up to a multiple of
GRAIN, or to a power of two below it."""
ALONE: tuple[object, ...] = "none", [], ""
"""The operation that oneDNN computes after the product: none."""


class PackedLinear(nn.Module):
    """A linear layer for inference that keeps its weight only in the memory order that oneDNN uses.

    Args:
        linear: The layer to replace, in float32 on a CPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # For one row oneDNN would choose an order that is slow for several; that for several is as fast for one.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), GRAIN)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    @property
    @torch.inference_mode()
    def weight(self) -> Tensor:
        """A copy, row by row."""
        return self.packed.to_dense()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        bias = self.bias
        if hidden_states.numel() // self.in_features in AT_ONCE:
            return self._product(hidden_states, self.packed, bias, *ALONE)
        rows = hidden_states.reshape(-1, self.in_features)
        made = [self._block(block) for block in rows.split(cut(len(rows)))] if len(rows) else [rows.new_empty(0)]
        return torch.cat(made).view(*hidden_states.shape[:-1], self.out_features)

    def _block(self, rows: Tensor) -> Tensor:
        missing = padded(len(rows)) - len(rows)
        made = self._product(nn.functional.pad(rows, (0, 0, 0, missing)), self.packed, self.bias, *ALONE)
        return made[: len(rows)]


def cut(rows: int) -> list[int]:
    """The sizes of the blocks into which `rows` rows are split for multiplication; the last block is padded later."""
    whole, rest = divmod(rows, MOST)
    parts = rest // BLOCK * BLOCK, rest % BLOCK
    return [MOST] * whole + [part for part in parts if part]


def padded(rows: int) -> int:
    """The number of rows, padding included, that are multiplied for a block of this many rows."""
    return 1 << (rows - 1).bit_length() if 0 < rows < GRAIN else -(-rows // GRAIN) * GRAIN


AT_ONCE = frozenset(n for n in range(1, MOST + 1) if cut(n) == [n] and padded(n) == n)
"""Numbers of rows that are one product, with none made up."""


def pack(model: nn.Module) -> int:
    """Pack the linear layers of a model in place, for inference; returns how many.

    Unchanged are weights that are quantized or not float32 on a CPU, layers with few outputs, hooks, an own `forward`
    or an adapter, and all layers if torch has no oneDNN. A weight that layers share with each other or with the
    embeddings is packed once for each layer, in addition to the shared weight.

    Args:
        model: The model, which can then no longer be trained; its packed weights can be read but not written.
    """
    if not available():
        return 0
    places = _places(model)
    count = len(places)
    while places:  # each weight is freed before the next is packed
        linear, held = places.popitem()
        packed = PackedLinear(linear)
        for parent, name in held:
            setattr(parent, name, packed)
    return count


def _places(model: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """The linear layers to pack, and for each of them all module attributes that refer to it."""
    wrapped = {id(part) for module in model.modules() if hasattr(module, "base_layer") for part in module.modules()}
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children omits a second name of the same module
            if isinstance(child, nn.Linear) and id(child) not in wrapped and packable(child):
                places.setdefault(child, []).append((parent, name))
    return places


def available() -> bool:
    """Whether torch has oneDNN with packed weights (the operations that Inductor uses)."""
    operators = "_linear_pointwise", "_reorder_linear_weight"
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)


def packable(linear: nn.Linear) -> bool:
    """Whether a layer is a plain linear one that gains from packing."""
    hooks = linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks
    if type(linear) is not nn.Linear or "forward" in vars(linear) or any(hooks):
        return False
    weight = linear.weight
    if type(weight) is not nn.Parameter:  # a quantized tensor may claim to be float32
        return False
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and len(weight) >= LEAST
