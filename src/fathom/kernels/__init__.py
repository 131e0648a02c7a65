"""Faster kernels for a GPU, by name: each replaces a function in `models/`, and a test compares the two.

`depth_mix`, `depth_pool` and `norm_rotate_mix` are ours, in Triton; the others are liger-kernel's (extra `gpu`). None
is a default: a recipe names them (`train.kernels`), or `--kernels` of `generate`, `evaluate` and `serve`.

`models/axes/replaceable.py` chooses between a kernel and the reference: double precision and exports that are opened
without Fathom use the reference. Ours are registered in `torch.library`, so `torch.compile` and FSDP2 work.
`norm_rotate_mix.py` says where its kernel applies.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence

import torch

from fathom.errors import SettingsError, to_install
from fathom.models.axes.replaceable import replace

HOMES = {
    **{name: name for name in ("depth_mix", "depth_pool", "norm_rotate_mix")},
    **dict.fromkeys(("rms_norm", "swiglu", "linear_cross_entropy"), "liger"),
}
"""The file that holds the function of each kernel's name."""
NAMES = tuple(HOMES)
NEEDS = {
    "depth_mix": ("triton", "triton"),
    "depth_pool": ("triton", "triton"),
    "norm_rotate_mix": ("triton", "triton"),
    "liger": ("liger_kernel", "liger-kernel"),
}
"""The module that each file imports, and the package to install for it."""


def use(names: Sequence[str], device: str | None = None) -> None:
    """From now on, compute the functions of these names by kernels, and all others by the PyTorch code in `models/`.

    Args:
        names: Any of `NAMES`; empty for no kernels.
        device: Where the model will be: `cuda`, `cuda:1`, ...; by default cuda where there is one. On a CPU a kernel
            runs in Triton's interpreter alone (TRITON_INTERPRET=1), which is for tests.
    """
    where = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    require(names, where)
    homes = {name: importlib.import_module(f"fathom.kernels.{HOMES[name]}") for name in names}
    replace({name: getattr(home, name) for name, home in homes.items()}, where)


def require(names: Sequence[str], where: str) -> None:
    """Refuse kernels that do not exist or cannot run here.

    Args:
        names: As `use` takes them.
        where: The type of device, `cuda` or `cpu`.
    """
    for name in names:
        if name not in HOMES:
            raise SettingsError(f"kernel {name!r}: allowed: any of {', '.join(NAMES)}")
    for name in names:
        module, package = NEEDS[HOMES[name]]
        if where != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise SettingsError(f"kernel {name} needs an NVIDIA GPU, and the model would be on {where}: leave it out")
        if importlib.util.find_spec(module) is None:
            raise SettingsError(f"kernel {name} needs {package}: {to_install('gpu')}")
