"""The Triton kernels as machine code for GPUs that need not be there: registers, spills and shared memory.

python -m tests.gpu.machine_code --out benchmarks/results/kernels-machine-code.json
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fathom.kernels import depth_mix, depth_pool, norm_rotate_mix
from fathom.report.provenance import provenance

CAPABILITIES = (80, 90)
SHARED = 48 * 1024
"""Bytes of shared memory that every multiprocessor gives a program."""
REGISTERS, WARPS = 65536, 8
"""Of a multiprocessor: its registers, and how many warps at least must fit it, to hide the time of a load."""


@dataclass(frozen=True)
class Kernel:
    """One kernel at one shape."""

    function: Any
    signature: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    shape: str
    most: int | None = None
    """Registers that a thread may take, where the launch says so."""

    def source(self) -> ASTSource:
        """What Triton compiles; pointers are known to be multiples of 16 bytes, as torch's are."""
        names = self.function.arg_names
        attributes: dict[tuple[int, ...], Any] = {}
        for i, name in enumerate(names):
            kind = self.signature.get(name, "constexpr")
            places = [(i, j) for j in range(len(kind))] if isinstance(kind, tuple) else [(i,)]
            if isinstance(kind, tuple) or kind.startswith("*"):
                attributes |= {key: [["tt.divisibility", 16]] for key in places}
        fixed = {(names.index(name),): value for name, value in self.constants.items()}
        signature = {name: self.signature.get(name, "constexpr") for name in names}
        return ASTSource(self.function, signature, fixed, attributes)


def mixes() -> Iterator[Kernel]:
    """The depth mix: groups of 1, 4 and 8 queries, heads of 64 and 128, up to 25 sources."""
    half, full = "*bf16", "*fp32"
    for group, width, count in ((1, 64, 2), (4, 64, 2), (4, 64, 7), (4, 64, 25), (8, 64, 7), (4, 128, 25)):
        fixed = depth_mix.constants(group, width)
        several = (half,) * count
        shape = f"G {group}, D {width}, {count} sources"
        inputs = {"query": half, "keys": several, "values": several, "weights": full, "rows": "i32"}
        forward = inputs | {"bias": full, "mixed": half}
        yield Kernel(depth_mix.depth_mix_forward, forward, fixed, 4, shape)
        grads = {"grad": half, "grad_query": half, "grad_keys": several, "grad_values": several}
        yield Kernel(depth_mix.depth_mix_backward, inputs | grads, fixed, 4, shape)


def rotated_mixes() -> Iterator[Kernel]:
    """The same with norms and rotation; once with the key's norm after it."""
    half, full = "*bf16", "*fp32"
    for group, width, count, last in (
        (1, 64, 2, False),
        (4, 64, 2, False),
        (4, 64, 7, False),
        (4, 64, 25, False),
        (8, 64, 7, False),
        (4, 128, 25, True),
    ):
        fixed = norm_rotate_mix.constants(4, group, width, 1e-6, last)
        keys, values = (half,) * (count - 1), (half,) * count
        shape = f"G {group}, D {width}, {count} sources"
        inputs = {"own": (half, half), "sources": keys, "values": values, "norms": (half, half)}
        inputs |= {"angles": (half, half), "rows": "i32", "turns": "i32"}
        made = {"bias": full, "made": (half, half, half, full)}
        yield Kernel(norm_rotate_mix.norm_rotate_mix_forward, inputs | made, fixed, 4, shape, norm_rotate_mix.REGISTERS)
        grads = {"weights": full, "grads": (half,) * 3, "made": (half, half, full)}
        grads |= {"of_sources": keys, "of_values": values}
        yield Kernel(norm_rotate_mix.norm_rotate_mix_backward, inputs | grads, fixed, 4, shape)


def pools() -> Iterator[Kernel]:
    """The pooling: rows of 1024 to 4096, up to 25 sources, with a bias."""
    half, full = "*bf16", "*fp32"
    for width, count in ((1024, 9), (2048, 2), (2048, 9), (2048, 16), (2048, 25), (4096, 9)):
        fixed = depth_pool.constants(width, 1e-6)
        several, shape = (half,) * count, f"width {width}, {count} sources"
        inputs = {"query": full, "sources": several, "weights": full, "rows": "i32"}
        warps = depth_pool.warps(width)
        yield Kernel(depth_pool.depth_pool_forward, inputs | {"bias": full, "mixed": half}, fixed, warps, shape)
        grads = {"grad": half, "grad_query": full, "grad_bias": full, "grad_sources": several, "programs": "i32"}
        yield Kernel(depth_pool.depth_pool_backward, inputs | grads, fixed, warps, shape)


@dataclass(frozen=True)
class Used:
    """What the machine code of a kernel takes."""

    kernel: str
    shape: str
    capability: int
    warps: int
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread that did not fit its registers, and lie in memory."""
    shared: int
    """Bytes of a program."""

    def too_much(self) -> str | None:
        """What is beyond its bound."""
        if self.spilled:
            return f"{self.spilled} bytes spilled"
        if self.registers * 32 * max(self.warps, WARPS) > REGISTERS:
            return f"{self.registers} registers in each of {32 * self.warps} threads"
        return f"{self.shared} bytes of shared memory" if self.shared > SHARED else None


def use_of(kernel: Kernel, capability: int) -> Used:
    """Compile for a GPU of this capability, and look into what was made."""
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(kernel.source(), target=target, options={"num_warps": kernel.warps, "maxnreg": kernel.most})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    name, spilled = kernel.function.fn.__name__, max(found["STACK"], found["LOCAL"])
    return Used(name, kernel.shape, capability, kernel.warps, found["REG"], spilled, made.metadata.shared)


def main() -> None:
    """Compile all, print, keep, and fail where one is beyond its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the log there")
    out = parser.parse_args().out
    found = []
    for kernel, capability in (
        (kernel, number) for kernel in (*mixes(), *rotated_mixes(), *pools()) for number in CAPABILITIES
    ):
        found.append(used := use_of(kernel, capability))
        name = f"{used.kernel:<26}{used.shape:<28}sm_{used.capability}"
        size = f"{used.registers:>3} registers  {used.spilled} spilled  {used.shared:>5} bytes shared"
        print(f"{name}  {size}", flush=True)
    if out is not None:
        bounds = {"registers": REGISTERS, "of_warps": WARPS, "shared": SHARED}
        head = {"provenance": vars(provenance()), "triton": triton.__version__, "bounds": bounds}
        rows = ",\n  ".join(json.dumps(asdict(used)) for used in found)
        text = json.dumps(head, indent=1).removesuffix("\n}")
        out.write_text(f'{text},\n "kernels": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
    beyond = [
        f"{used.kernel} ({used.shape}, sm_{used.capability}): {used.too_much()}" for used in found if used.too_much()
    ]
    if beyond:
        raise SystemExit("\n".join(beyond))


if __name__ == "__main__":
    main()
