"""Dispatch modes: one that counts operators, and those that see what would go wrong, or slowly, on a GPU: reads by the
host, and tensors on two devices."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fathom
from fathom.errors import ModelError

READS = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor"),
)
"""Operators whose result, or its size, the host must know before it goes on."""
MASKED = ("index.Tensor", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index.Tensor")
"""Those that look for the places of a mask, which is such a read, where an index is of booleans."""
COPIES = ("_to_copy", "copy_")


PACKAGE = Path(fathom.__file__).parent


def place() -> str:
    """The innermost line of the package on the stack. A checkout may be called fathom too: its tests do not count."""
    ours = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "nowhere in fathom"


def named(func: Any, names: tuple[str, ...]) -> bool:
    """Whether an operator is one of these, by name or by name and overload."""
    name = func._schema.name.removeprefix("aten::")
    return name in names or f"{name}.{func._overloadname}" in names


def waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator makes the host wait for a device."""
    if named(func, READS):
        return True
    masks = (x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor))
    return named(func, MASKED) and any(x.dtype in (torch.bool, torch.uint8) for x in masks)


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """Lists what would make the host wait, whatever device it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            self.seen.append(f"{func} at {place()}")
        return func(*args, **(kwargs or {}))


class OneDevice(TorchDispatchMode):
    """Refuses operators on tensors of two devices and reads by the host, which `meta` alone lets pass."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds = set(self.kinds((args, kwargs)))
        if isinstance(func, HigherOrderOperator):
            if len(kinds) > 1:
                raise ModelError(f"{func} at {place()}: tensors on {' and '.join(sorted(kinds))}")
            return func(*args, **kwargs)
        if waits(func, args) and "meta" in kinds:
            raise ModelError(f"{func} at {place()}: a read by the host")
        if named(func, COPIES):
            target = kwargs.get("device")
            if "meta" in kinds and target is not None and torch.device(target).type == "cpu":
                raise ModelError(f"{func} at {place()}: a copy to the host")
        elif len(kinds) > 1:
            raise ModelError(f"{func} at {place()}: tensors on {' and '.join(sorted(kinds))}")
        return func(*args, **kwargs)

    @staticmethod
    def kinds(arguments: Any) -> Iterator[str]:
        """Devices of all tensors; a single number of the host's goes along with a launch."""
        for x in tree_leaves(arguments):
            if isinstance(x, Tensor) and (x.ndim or x.device.type != "cpu"):
                yield x.device.type
