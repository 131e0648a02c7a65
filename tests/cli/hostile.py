"""Model directories with one thing wrong, drawn from a seed, and commands that are tried on them."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from fathom.cli.main import main
from tests.tiny import tiny_tokenizer

SECONDS = 120
"""After which a case counts as a hang, on a busy machine."""
SIZE = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {**SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=8, max_position_embeddings=64),
    "llama": lambda: LlamaConfig(**SHAPE, num_key_value_heads=1, max_position_embeddings=64),
    "gpt_neox": lambda: GPTNeoXConfig(**SHAPE, max_position_embeddings=64),
    "gpt2": lambda: GPT2Config(**SIZE, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "opt": lambda: OPTConfig(
        **SIZE, hidden_size=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    ),
    "gemma": lambda: GemmaConfig(**SHAPE, num_key_value_heads=1, head_dim=8, max_position_embeddings=64),
}
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 7, 1 << 31, 10**12, 10**30, 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "os.system",
        "../../etc/passwd",
        "/etc/passwd",
        "evil.py",
        "a" * 5000,
        "\ud800",
        "{{ 1 }}",
        "float8_e4m3fn",
    ),
    *([], [1], [[]], ["x", None], {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "default", "rope_theta": 0}),
]
HOSTILE: dict[str, list[Any]] = {
    "auto_map": [{"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}, 5, {}],
    "model_type": ["evil", "bert", "t5", "qwen3_moe", "fathom", "llava", "mamba", ""],
    "architectures": [["Evil"], [], "LlamaForCausalLM", [7]],
    "quantization_config": [
        {"quant_method": name, "load_in_4bit": True, "bits": 4} for name in ("bitsandbytes", "gptq", "awq", "evil")
    ],
    "text_config": [{}, {"model_type": "llama"}, 3],
    "rope_scaling": [
        {"type": "linear", "factor": 0},
        {"rope_type": "longrope"},
        {"rope_type": "dynamic", "factor": "2"},
    ],
    "rope_parameters": [{"rope_type": "yarn"}, {"full_attention": {}}, 3],
    "dtype": ["os.system", "float33", "bfloat16", 7, "load"],
    "torch_dtype": ["float8_e4m3fn", "int8", "nn"],
    "attn_implementation": ["evil/kernel", "flash_attention_2", "evil"],
    "_attn_implementation": ["evil/kernel", "x" * 400],
    "hidden_act": ["evil", 5, "silu"],
    "custom_generate": ["evil"],
    "tokenizer_class": ["Evil", "BertTokenizer", "LlamaTokenizer", "GPT2Tokenizer", 5],
    "layer_types": [["full_attention"], ["evil"] * 2, ["sliding_attention"] * 2, 9],
    "mixer": ["evil", "depth_attention", 3],
    "recurrence_options": [{"trips": 10**9}, {"trips": -1}, {"evil": 1}],
    "chat_template": ["{% for i in range(10**9) %}{% endfor %}", "{{ ''.__class__ }}", 5],
    "watermarking_config": [{"bias": "x"}],
    "num_beams": [0, "x", 10**9],
    "use_cache": ["x", None],
}
DTYPES = ("F64", "F32", "F16", "BF16", "I8", "I64", "BOOL", "F8_E4M3", "F99", "", 3)
PEOPLE = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
WEIGHTS, INDEX, SENTINEL = "model.safetensors", "model.safetensors.index.json", "ran"
BOMB = "from pathlib import Path\nPath(__file__).with_name('ran').write_text('ran')\n"


def make_bases(place: Path) -> None:
    """A good directory of each family, and what the commands need beside it."""
    tokenizer = tiny_tokenizer()
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
        (place / name / "evil.py").write_text(BOMB)
    (place / "text.txt").write_text("the depth of a river is measured with rope and lead\n" * 8)


# What goes wrong.


def mutate(directory: Path, chance: random.Random) -> str:
    """Change one thing in a directory; returns what, in words."""
    change = chance.choices(CHANGES, weights=[4, 3, 4, 3, 3, 2, 2])[0]
    return f"{change.__name__}: {change(directory, chance)}"


def json_value(directory: Path, chance: random.Random, names: tuple[str, ...] = PEOPLE) -> str:
    """A value anywhere in a JSON file is another one, or gone."""
    file = directory / chance.choice([name for name in names if (directory / name).exists()])
    values = json.loads(file.read_text())
    inner, path = values, []
    while True:
        keys: list[Any] = [*inner] if isinstance(inner, dict) else [*range(len(inner))]
        if not keys:
            return f"{file.name} {path} is empty"
        key = chance.choice(keys)
        path.append(key)
        if not isinstance(inner[key], dict | list) or chance.random() < 0.3:
            break
        inner = inner[key]
    if chance.random() < 0.2:
        del inner[key]
        said = "deleted"
    else:
        inner[key] = chance.choice(ODD)
        said = f"{inner[key]!r:.60}"
    file.write_text(json.dumps(values))
    return f"{file.name} {path} {said}"


def hostile_key(directory: Path, chance: random.Random) -> str:
    """A key that libraries act upon."""
    file = directory / chance.choice(["config.json", "config.json", "tokenizer_config.json", "generation_config.json"])
    key = chance.choice([*HOSTILE])
    value = chance.choice(HOSTILE[key])
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**values, key: value}))
    return f"{file.name} {key}={value!r:.80}"


def header(directory: Path, chance: random.Random) -> str:
    """The header of the weights lies."""
    path = directory / WEIGHTS
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    name = chance.choice([key for key in table if key != "__metadata__"])
    entry, which = table[name], chance.randrange(8)
    if which == 0:
        entry["dtype"] = chance.choice(DTYPES)
    elif which == 1:
        entry["shape"] = chance.choice([[], [0], [-1, 4], [10**12], [2] * 40, entry["shape"][::-1], "x", [1.5], None])
    elif which == 2:
        entry["data_offsets"] = chance.choice([[0, 4], [4, 0], [-8, 8], [0, 10**15], [0], "x", [0, 10**30], None])
    elif which == 3:
        table[chance.choice(["", "evil", "a" * 3000, "../x", "model..weight", "é"])] = table.pop(name)
    elif which == 4:
        del table[name]
    elif which == 5:
        table["__metadata__"] = chance.choice([None, 5, {"format": 5}, {"format": "tf"}, [], {"a": {"b": "c"}}])
    elif which == 6:
        table[name] = chance.choice([None, [], 5, {}, {"dtype": "F32"}])
    else:
        other = chance.choice([key for key in table if key != "__metadata__"])
        entry["data_offsets"] = table[other]["data_offsets"]
    new = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])
    return f"{name} {('dtype', 'shape', 'offsets', 'name', 'gone', 'metadata', 'entry', 'overlap')[which]}"


def raw_bytes(directory: Path, chance: random.Random) -> str:
    """Bytes of a file are flipped, cut or replaced."""
    file = directory / chance.choice([*PEOPLE, WEIGHTS, WEIGHTS])
    content, which = bytearray(file.read_bytes()), chance.randrange(6)
    if which == 0:
        for _ in range(chance.choice([1, 20])):
            content[chance.randrange(min(len(content), 4000))] = chance.randrange(256)
    elif which == 1:
        del content[chance.randrange(len(content)) :]
    elif which == 2:
        content[:0] = chance.choice([b"\xef\xbb\xbf", b"\x00", b"\xff\xfe", b"[" * 100_000, b" " * 1000])
    elif which == 3:
        content[:] = chance.choice([b"", b"null", b"[]", b'"x"', b"{}", b"7", b"[" * 200_000, b"9" * 100_000])
    elif which == 4:
        content += chance.choice([b"\x00" * 64, b"}", b"{}"])
    else:
        content[:8] = chance.choice([b"\xff" * 8, struct.pack("<Q", 1 << 40), struct.pack("<Q", 2), b"\0" * 8])
    file.write_bytes(bytes(content))
    return f"{file.name} {('flipped', 'cut', 'prefix', 'replaced', 'suffix', 'length')[which]}"


def index(directory: Path, chance: random.Random) -> str:
    """The weights are in two files, and the index of them lies."""
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    for file, members in (("one.safetensors", names[::2]), ("two.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in members}, directory / file, {"format": "pt"})
    (directory / WEIGHTS).unlink()
    where: Any = {name: "one.safetensors" if name in names[::2] else "two.safetensors" for name in names}
    name, which = chance.choice(names), chance.randrange(6)
    if which == 0:
        where[name] = chance.choice(
            ["../one.safetensors", "/etc/passwd", "three.safetensors", "", 5, None, ["x"], "evil.py", "."]
        )
    elif which == 1:
        where[name] = "one.safetensors" if where[name] == "two.safetensors" else "two.safetensors"
    elif which == 2:
        del where[name]
    elif which == 3:
        where[chance.choice(["evil", ""])] = "one.safetensors"
    elif which == 4:
        where = chance.choice([None, [], "x", {}, {"a": {}}])
    else:
        (directory / "two.safetensors").write_bytes(b"")
    (directory / INDEX).write_text(
        json.dumps({"metadata": {"total_size": chance.choice(ODD[:6])}, "weight_map": where})
    )
    return f"{name} {('place', 'other shard', 'gone', 'spare', 'map', 'empty shard')[which]}"


def weights(directory: Path, chance: random.Random) -> str:
    """Tensors of other values, shapes, types or names than the configuration needs."""
    tensors = load_file(directory / WEIGHTS)
    name, which = chance.choice(sorted(tensors)), chance.randrange(6)
    tensor = tensors[name]
    if which == 0:
        tensors[name] = torch.full_like(tensor, chance.choice([float("nan"), float("inf"), 1e38, 0.0]))
    elif which == 1:
        tensors[name] = tensor.reshape(-1)[: max(1, tensor.numel() // 2)].clone()
    elif which == 2:
        tensors[name] = tensor.to(chance.choice([torch.int8, torch.int64, torch.bool, torch.float64, torch.complex64]))
    elif which == 3:
        tensors[chance.choice(["evil", "model.layers.99.x", "lm_head.bias"])] = tensors.pop(name)
    elif which == 4:
        tensors = {}
    else:
        tensors[name] = tensor.unsqueeze(0)
    save_file(tensors, directory / WEIGHTS, chance.choice([None, {"format": "pt"}]))
    return f"{name} {('values', 'half', 'type', 'name', 'none at all', 'dimension')[which]}"


def files(directory: Path, chance: random.Random) -> str:
    """A file is missing, a folder, a link, a pipe or a pickle."""
    name, which = chance.choice([*PEOPLE, WEIGHTS]), chance.randrange(6)
    path = directory / name
    if which < 4 and path.exists():
        path.unlink()
    if which == 1:
        path.mkdir()
    elif which == 2:
        path.symlink_to("/etc/passwd")
    elif which == 3:
        os.mkfifo(path)
    elif which == 4:
        (directory / chance.choice(["pytorch_model.bin", "x.PT", "deep/a.pkl", "w.npy"])).parent.mkdir(exist_ok=True)
        (directory / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    elif which == 5:
        (directory / "loop").symlink_to(directory)
    return f"{name} {('missing', 'a folder', 'a link', 'a pipe', 'pickle', 'a loop of links')[which]}"


CHANGES = (json_value, hostile_key, header, raw_bytes, index, weights, files)


# What is tried.


def commands(place: Path, directory: Path) -> dict[str, list[str]]:
    """Command lines by name."""
    model, out = str(directory), place / "out"
    return {
        "generate": ["generate", model, "the depth", "--max-new-tokens", "2", "--device", "cpu"],
        "evaluate": ["evaluate", model, "--perplexity", str(place / "text.txt"), "--device", "cpu"],
        "lens": ["lens", model, "the depth", "-o", str(out / "lens.html"), "--device", "cpu"],
        "export": ["export", model, "--to", str(out / "exported")],
        "lineage": ["lineage", "compare", model, str(place / "qwen3"), "--out", str(out / "lineage")],
    }


@dataclass(frozen=True)
class End:
    """How a case ended."""

    case: str
    code: int | None
    error: str
    fault: str
    """What is wrong with it; nothing if all is as it should be."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` after so long; code that no signal interrupts ends the process with a traceback."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


STARTED: list[str] = []
"""Programs started and addresses asked for, while it is looked for them."""
_LOOKING = [False]


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if not _LOOKING[0]:  # a process hears of every file that it opens, for as long as it lives
        return
    ours = event == "subprocess.Popen" and arguments[0] in ("uname", "git")  # what a log says of the machine
    if not ours and event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"):
        STARTED.append(f"{event} {arguments!r:.200}")


@cache
def listen() -> None:
    """From now on: such a hook is never removed."""
    sys.addaudithook(_hear)


def try_case(place: Path, number: int) -> End:
    """Make a bad directory and run a command on it, in this process."""
    chance = random.Random(number)
    family = [*FAMILIES][number % len(FAMILIES)]
    directory = Path(tempfile.mkdtemp(dir=place)) / family
    shutil.copytree(place / family, directory)
    said = mutate(directory, chance)
    command = [*commands(place, directory)][number // len(FAMILIES) % 5]
    shutil.rmtree(place / "out", ignore_errors=True)
    (place / "out").mkdir()
    out, err, code, fault = io.StringIO(), io.StringIO(), None, ""
    STARTED.clear()
    listen()
    _LOOKING[0] = True
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited(SECONDS):
            code = main(commands(place, directory)[command])
    except TimeoutError:
        fault = "hangs"
    except BaseException as error:  # SystemExit too: main returns its code
        fault = f"{type(error).__name__}: {error}"
    finally:
        _LOOKING[0] = False
    last = err.getvalue().rstrip().rpartition("\n")[2]
    ran = directory.rglob(SENTINEL) if not (directory / "loop").is_symlink() else directory.glob(SENTINEL)
    if not fault:
        faults = {
            f"exit code {code}": code not in (0, 2),
            "no line of Fathom's": code == 2 and not last.startswith("fathom: "),
            "a traceback": "Traceback" in err.getvalue(),
            "transformers' table": "REPORT" in err.getvalue(),
            "code of the directory ran": any(ran),
            f"started {STARTED}": bool(STARTED),
        }
        fault = "; ".join(name for name, there in faults.items() if there)
    shutil.rmtree(directory.parent, ignore_errors=True)
    return End(f"{number} {command} {family}: {said}", code, last, fault)
