"""What a GPU is asked for, cell by cell: conformance, kernels, bandwidth, training, decoding (docs/how-to/gpu.md).

    python benchmarks/gpu.py --plan 10            # the cells of the ten-minute plan; again: it goes on where it stopped
    python benchmarks/gpu.py --plan 120 --minutes 9 --step train
    python benchmarks/gpu.py --plan 120 --tiny --out runs/kit   # small shapes, on a CPU too, to try the kit itself

A cell is a process of its own, so that one that fails or runs out of memory costs no other. Its result is one line of
OUT/STEP.jsonl. A cell begins only while there are minutes left, is stopped with them, and then comes first next time.
The exit code is 0 when the plan is done and 3 when cells are left; `make gpu` calls again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLANS = (10, 30, 120)
LEFT = 3
LEAST = 20.0
"""Seconds below which no cell begins."""
KERNELS = ("norm_rotate_mix", "depth_pool", "rms_norm", "swiglu")
TINY = "tiny"


@dataclass(frozen=True)
class Cell:
    """One result: a step, a name, and the shortest plan that has it."""

    step: str
    name: str
    plan: int = 120


def cells(tiny: bool = False) -> list[Cell]:
    """Every cell, those of the shortest plan first."""
    found = [*_checks(), *_bandwidths(), *_trainings(tiny), *_decodings(tiny)]
    return sorted(found, key=lambda cell: cell.plan)


TESTED = {
    "vanilla_is_qwen3": (10, ["tests/models/test_mechanisms.py", "-k", "vanilla_is_qwen3"]),
    "mechanisms": (30, ["tests/models/test_mechanisms.py", "-k", "not graph and not fsdp and not clean_process"]),
    "models": (30, ["tests/models", "-m", "not slow", "--ignore=tests/models/test_mechanisms.py"]),
    "caches": (30, ["tests/kvcache", "-m", "not slow"]),
    "graphs": (120, ["tests/models/test_mechanisms.py", "-k", "graph"]),
}
"""Tests that make on CUDA whatever names no device, with the shortest plan that has them."""


def _checks() -> Iterator[Cell]:
    for name, (plan, _) in TESTED.items():
        yield Cell("conformance", name, plan)
    yield Cell("kernels", "tests/kernels", 30)


def _bandwidths() -> Iterator[Cell]:
    for sources in (1, 2, 4, 12):
        yield Cell("bandwidth", f"depth_mix {sources}", 10 if sources == 2 else 30)
        yield Cell("bandwidth", f"norm_rotate_mix {sources}", 10 if sources == 2 else 30)
    for sources in (2, 9):
        yield Cell("bandwidth", f"depth_pool {sources}", 10 if sources == 9 else 30)


def _trainings(tiny: bool) -> Iterator[Cell]:
    """`SHAPE MODEL HOW`."""
    from fathom.models.registry import DEFAULTS, MECHANISMS

    names = [name for name in MECHANISMS if name not in DEFAULTS.values()]
    several = [name for name in names if MECHANISMS[name].axis == "recurrence"]
    one_trip = [name for name in names if name not in several and name != "depth_attention"]
    for number, shape in enumerate((TINY,) if tiny else ("410m", "1.5b", "3b")):
        for model in ("hf", "vanilla", "depth_attention"):
            for how in ("eager", "compiled"):
                yield Cell("train", f"{shape} {model} {how}", 10 if number == 0 else 30 if number == 1 else 120)
        for model in ("depth_attention", "attention_residuals"):
            yield Cell("train", f"{shape} {model} kernels", 30 if number == 0 else 120)
        for model in one_trip:
            for how in ("eager", "compiled"):
                yield Cell("train", f"{shape} {model} {how}")
        for model in several if number == 0 else ():
            yield Cell("train", f"{shape} {model} eager")


def _decodings(tiny: bool) -> Iterator[Cell]:
    """`SHAPE MODEL HOW BATCH`."""
    for number, shape in enumerate((TINY,) if tiny else ("410m", "1.5b", "3b")):
        for batch in (1, 64):
            for model, how in (
                *(("hf", "eager"), ("vanilla", "eager"), ("vanilla", "compiled"), ("depth_attention", "compiled")),
                *(("vanilla", "continuous"), ("depth_attention", "eager"), ("depth_attention", "kernels")),
            ):
                yield Cell("decode", f"{shape} {model} {how} {batch}", 30 if number == 0 else 120)


class Log:
    """OUT/STEP.jsonl: where it was made, and a line for each cell."""

    def __init__(self, folder: Path, step: str) -> None:
        self.path = folder / f"{step}.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        """What is there; a line that was cut off is none."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def done(self) -> set[str]:
        """The cells that are there."""
        return {row["cell"] for row in self.rows() if "cell" in row}

    def add(self, row: dict[str, Any]) -> None:
        """One more line, behind whatever was cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if whole else "\n") + json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


Run = Callable[[Cell, float], dict[str, Any] | None]
"""Runs a cell for so many seconds at most; None where they did not do."""


def work(wanted: Sequence[Cell], folder: Path, seconds: float, run: Run, head: Callable[[], dict[str, Any]]) -> int:
    """Run what is not there yet, as long as there is time; how many cells are left."""
    end = time.monotonic() + seconds
    todo = [cell for cell in wanted if cell.name not in Log(folder, cell.step).done()]
    print(f"{len(wanted) - len(todo)} of {len(wanted)} cells are there", flush=True)
    while todo and (left := end - time.monotonic()) > min(LEAST, seconds / 2):
        cell, log, began = todo[0], Log(folder, todo[0].step), time.monotonic()
        found = run(cell, left)
        took = time.monotonic() - began
        if found is None and left < 0.9 * seconds:
            break  # next time it comes first, and has all the time there is
        if not log.rows():
            log.add(head())
        log.add({"cell": cell.name, "took": round(took, 1), **(found or {"failed": f"not done after {took:.0f} s"})})
        print(f"{cell.step}: {cell.name}: {json.dumps(found)}", flush=True)
        todo.pop(0)
    return len(todo)


def head() -> dict[str, Any]:
    """Where results come from, for the first line of a file."""
    from fathom.report.provenance import provenance

    return asdict(provenance())


def in_a_process(tiny: bool, folder: Path) -> Run:
    """A cell as a process of its own; tests that fail leave their output in the folder."""

    def run(cell: Cell, seconds: float) -> dict[str, Any] | None:
        words = [sys.executable, __file__, "--out", str(folder), "--cell", cell.step, cell.name]
        words += ["--tiny"] if tiny else []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, cwd=ROOT, start_new_session=True, **pipes) as process:
            try:
                output, errors = process.communicate(timeout=seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
                if isinstance(error, subprocess.TimeoutExpired):
                    return None
                raise
        lines = output.strip().splitlines()
        if process.returncode == 0 and lines:
            return json.loads(lines[-1])
        said = (errors.strip() or output.strip()).splitlines()
        return {"failed": said[-1][:500] if said else f"exit code {process.returncode}"}

    return run


def measured(step: str, name: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """One cell's result, in this process."""
    if step in ("conformance", "kernels"):
        return tested(step, name, folder)
    if step == "bandwidth":
        return bandwidth(*name.split(), tiny)  # type: ignore[arg-type]
    return train_step(*name.split()) if step == "train" else decoding(*name.split(), tiny)  # type: ignore[arg-type]


def tested(step: str, name: str, folder: Path) -> dict[str, Any]:
    """Tests passed, failed and skipped; several at a time with pytest-xdist, since small models leave a GPU idle."""
    import importlib.util

    words = TESTED[name][1] if step == "conformance" else [name]
    several = importlib.util.find_spec("xdist") is not None
    jobs = ["-n", str(max(1, len(os.sched_getaffinity(0)) - 2)), "--dist", "worksteal"] if several else []
    environment = {"FATHOM_TEST_DEVICE": device()} if step == "conformance" else {}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short", "-rf", *jobs, *words]
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | environment
    log = folder / f"{step}-{Path(name).name}.txt"  # also of tests that are stopped with the minutes
    with log.open("w", encoding="utf-8") as file:
        subprocess.run(words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text(encoding="utf-8").strip().splitlines() or [""]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])}
    if not counts:
        raise SystemExit(f"pytest {' '.join(words)}: {lines[-1]}")
    failures = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if not failures:
        log.unlink()
        return counts
    return counts | {"failures": failures}


def device() -> str:
    """Where cells run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def seconds_of(call: Callable[[], Any], rounds: int, warm: int = 3) -> float:
    """Median seconds of a call: between events of the device where there is one."""
    import torch

    for _ in range(warm):
        call()
    if device() == "cpu":
        return statistics.median(_clocked(call) for _ in range(rounds))
    pairs = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1000


def _clocked(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def bandwidth(kernel: str, sources: str, tiny: bool) -> dict[str, Any]:
    """Forward, and forward with backward: the reference eager and compiled, and the kernel, beside a device copy."""
    import torch

    from fathom.errors import SettingsError
    from fathom.kernels import use

    torch.manual_seed(0)
    dtype, where = torch.bfloat16, device()
    of = {"depth_mix": mix_of, "norm_rotate_mix": rotated_mix_of, "depth_pool": pool_of}[kernel]
    call, inputs = of(int(sources), tiny, dtype, where)
    grads = [torch.randn_like(x) for x in call()]
    once, made = (sum(x.nbytes for x in tensors) for tensors in (inputs, grads))
    # Forward reads everything and writes the outputs; backward reads everything and their gradients and writes its own.
    moved = {"forward": once + made, "both": once + made + 2 * once + made}
    rounds = 2 if tiny else 30
    big = torch.empty(1 << (16 if tiny else 28), dtype=dtype, device=where)
    other = torch.empty_like(big)
    copy = 2 * big.nbytes / seconds_of(lambda: other.copy_(big), rounds)
    found: dict[str, Any] = {"copy_gb_per_s": round(copy / 1e9, 1)}
    for way in ("eager", *(() if tiny else ("compiled",)), "kernel"):
        try:
            use([kernel] if way == "kernel" else [], where)
        except SettingsError as error:
            found[way] = {"refused": str(error)}
            continue
        this = torch.compile(call) if way == "compiled" else call

        def both(this: Callable[[], Any] = this) -> None:
            torch.autograd.grad(this(), inputs, grads, allow_unused=True)

        for name, timed in (("forward", this), ("both", both)):
            seconds = seconds_of(timed, rounds)
            share = moved[name] / seconds / copy
            found.setdefault(way, {})[name] = {"ms": round(1000 * seconds, 4), "of_copy": round(share, 3)}
    use([])
    return found


Made = tuple[Callable[[], Sequence[Any]], list[Any]]
"""What makes a layer's outputs, and its inputs."""


def heads_of(count: int, tiny: bool, dtype: Any, where: str) -> Any:
    """32768 tokens of so many heads of width 64, `[B, T, H, D]`."""
    import torch

    batch, length = (1, 4) if tiny else (16, 2048)
    return torch.randn(batch, length, count, 64, device=where, dtype=dtype)


def mix_of(sources: int, tiny: bool, dtype: Any, where: str) -> Made:
    """A layer's mix at 32768 tokens of 16 query and 4 key-value heads."""
    from fathom.models import FathomConfig
    from fathom.models.mixers.depth_attention import DepthAttention

    query, *rest = (
        heads_of(count, tiny, dtype, where).transpose(1, 2).requires_grad_() for count in (16, *[4] * (2 * sources + 2))
    )
    mixer = DepthAttention(FathomConfig(mixer="depth_attention"), 1)
    return lambda: [mixer(query, rest[0], rest[1], tuple(rest[2:]))], [query, *rest]


def rotated_mix_of(sources: int, tiny: bool, dtype: Any, where: str) -> Made:
    """The same, from raw queries and keys: their norms and rotation too."""
    import torch

    from fathom.models import FathomConfig
    from fathom.models.axes.replaceable import faster
    from fathom.models.decoder.rms_norm import RMSNorm
    from fathom.models.decoder.rotary import rotate
    from fathom.models.mixers.depth_attention import DepthAttention

    query, key, value = own = [heads_of(n, tiny, dtype, where).requires_grad_() for n in (16, 4, 4)]
    rest = [heads_of(4, tiny, dtype, where).transpose(1, 2).requires_grad_() for _ in range(2 * sources)]
    norms = [RMSNorm(64, eps=1e-6).to(where, dtype) for _ in range(2)]
    turns = torch.rand(1, query.shape[1], 32, device=where) * 6
    cos, sin = torch.cat((turns, turns), -1).cos().to(dtype), torch.cat((-turns, turns), -1).sin().to(dtype)
    mixer = DepthAttention(FathomConfig(mixer="depth_attention"), 1)

    def call() -> Sequence[Any]:
        if (fused := faster("norm_rotate_mix", value)) is not None:
            return fused(own, tuple(rest), mixer.self_bias, norms, (cos, sin), False)
        turned = rotate(norms[0](query).transpose(1, 2), norms[1](key).transpose(1, 2), cos, sin)
        return *turned, mixer(*turned, value.transpose(1, 2), tuple(rest))

    return call, [*own, *rest]


def pool_of(sources: int, tiny: bool, dtype: Any, where: str) -> Made:
    """A sub-layer's read at 32768 tokens of width 1536."""
    import torch

    from fathom.models import FathomConfig
    from fathom.models.residuals.attention_residuals import AttentionResiduals

    width, shape = (64, (1, 4, 64)) if tiny else (1536, (16, 2048, 1536))
    config = FathomConfig(hidden_size=width, residual="attention_residuals")
    residual = AttentionResiduals(config, 1).to(where)
    for parameter in residual.parameters():
        torch.nn.init.normal_(parameter)
    state = tuple(torch.randn(shape, device=where, dtype=dtype, requires_grad=True) for _ in range(sources))
    return lambda: [residual.read(state)[0]], list(state)


def model_of(shape: str, name: str, how: str, training: bool) -> tuple[Any, int, int]:
    """A model with random weights, and its batch and length."""
    import torch

    import train
    from fathom.kernels import use

    keys, batch, length = train.shape_of(shape)
    use(KERNELS if how == "kernels" else [], device())
    model = train.build(name, keys, None, device())
    return (model if training else model.eval().to(torch.bfloat16)), batch, length


def train_step(shape: str, name: str, how: str) -> dict[str, Any]:
    """Seconds of a step, MFU by vanilla's FLOPs, and the peak of memory."""
    import torch

    import train
    from fathom.models import FathomConfig
    from fathom.models.cost import flops_per_token

    model, batch, length = model_of(shape, name, how, training=True)
    keys, *_ = train.shape_of(shape)
    ids = torch.randint(0, keys["vocab_size"], (batch, length), device=device())
    step = train.step_of(model, ids, how == "compiled", torch.bfloat16)
    small = shape == TINY
    seconds = seconds_of(step, 1 if small else 10, 1 if small else 3)
    tokens = batch * length / seconds
    flops = 3 * flops_per_token(FathomConfig(**keys), length)
    peak = torch.cuda.max_memory_allocated() if device() == "cuda" else None
    return {
        **{"seconds": round(seconds, 5), "tokens_per_second": round(tokens), "batch": batch, "length": length},
        **{"mfu": round(flops * tokens / train.PEAK, 5), "peak_bytes": peak},
    }


def decoding(shape: str, name: str, how: str, batch: str, tiny: bool) -> dict[str, Any]:
    """Tokens per second behind a prompt; the prompt's own time is taken off."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    rows, prompt, new = int(batch), *((8, 4) if tiny else (1024, 128))
    model, _, _ = model_of(shape, name, how, training=False)
    model.generation_config.eos_token_id = None
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt), device=device())
    static = {"cache_implementation": "static"} if how == "compiled" else {}

    def make(tokens: int) -> Any:
        if how == "continuous":
            config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
            pages = -(-rows * (prompt + new) // 32) + rows
            batching = ContinuousBatchingConfig(page_size=32, num_blocks=pages, max_batch_tokens=max(512, rows * 8))
            return model.generate_batch(ids.tolist(), config, batching, progress_bar=False)
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return model.generate(ids, do_sample=False, pad_token_id=0, **length, **static)

    with torch.no_grad():
        whole = seconds_of(lambda: make(new), 1 if tiny else 3, 1)
        first = seconds_of(lambda: make(1), 1 if tiny else 3, 1)
    return {
        **{
            "tokens_per_second": round(rows * (new - 1) / max(whole - first, 1e-9), 1),
            "prefill_seconds": round(first, 4),
        },
        **{"batch": rows, "prompt": prompt, "new": new},
    }


def main() -> int:
    """Run a plan, or one cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=int, choices=PLANS, default=PLANS[-1], help="minutes that there are in all")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default: 9)")
    parser.add_argument("--step", action="append", choices=sorted({cell.step for cell in cells()}))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU too: try the kit, not the device")
    parser.add_argument("--cell", nargs=2, metavar=("STEP", "NAME"), help="measure this one and print it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cell is not None:
        print(json.dumps(measured(*options.cell, options.tiny, options.out)))
        return 0
    if device() == "cpu" and not options.tiny:
        print("benchmarks/gpu.py: there is no CUDA device here; --tiny tries the kit on a CPU", file=sys.stderr)
        return 2
    steps = options.step or [cell.step for cell in cells()]
    wanted = [cell for cell in cells(options.tiny) if cell.plan <= options.plan and cell.step in steps]
    left = work(wanted, options.out, 60 * options.minutes, in_a_process(options.tiny, options.out), head)
    print(f"{left} cells to go" if left else "the plan is done")
    return LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main())
