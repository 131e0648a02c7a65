"""What Fathom computes, small enough to repeat after every change: golden.json holds it, `--check` names what differs.

    python benchmarks/golden.py --check                       # exit code 1 if anything differs
    python benchmarks/golden.py --check --only models,caches
    python benchmarks/golden.py --only corpus                 # write these sections anew, keep the others

models       logits and the losses of 20 steps, of every mechanism and of some compositions
shards       the files that `fathom prepare` writes
corpus       the files that `fathom corpus` writes
experiments  what `fathom compare` and `fathom ladder` report of runs whose losses are planted
lineage      what `fathom lineage compare` reports of a child, a disguised child and a stranger
caches       tokens, logits and bytes of every compressed cache
answers      fifty answers of the server

Files are compared by their SHA-256, whole numbers and words as they are, other numbers to five digits: another
processor rounds otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import io
import json
import math
import random
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fathom.checkpoints.export import export
from fathom.checkpoints.file_names import RECIPE, RESULT
from fathom.cli.main import main as fathom
from fathom.experiments.arms import training_flops
from fathom.kvcache import METHODS, build_cache, cache_bytes, prefill
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import DEFAULTS, known, parse_mechanism
from fathom.recipe import Recipe, parse_recipe
from fathom.training import TrainResult, build_training

GOLDEN = Path(__file__).with_name("golden.json")
DIGITS, CLOSE, TINY = 7, 1e-5, 1e-7
"""Digits that are written; two numbers are equal within this share of the larger, or this much."""
SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 256},
    "initializer_range": 0.1,
}
COMPOSED = ("loop+depth_attention", "ponder+depth_attention", "loop+denseformer", "depth_attention+attention_residuals")
VARIANTS = {
    "delta": ("attention_residuals", {"residual_options": {"variant": "delta"}}),
    "delta_block": ("attention_residuals", {"residual_options": {"variant": "delta_block", "block_size": 3}}),
    "loop, kv first": ("loop", {"recurrence_options": {"prelude": 1, "kv": "first"}}),
    "loop+depth_attention, sources once": ("loop+depth_attention", {"mixer_options": {"across_trips": "first"}}),
    "loop+hyper_connections, per visit": ("loop+hyper_connections", {"residual_options": {"per_visit": True}}),
}
"""Options that compute something else than their mechanism's defaults."""
PUZZLE = {"directory": "puzzle:z60?elements=4", "sequence_length": 5}
MOMENT = {
    *("date", "command", "commit", "hardware", "versions", "seconds", "machine", "created", "id", "sha256"),
    *("directory", "inputs", "recipe", "crc32", "key", "card", "time", "times"),
}
"""Keys whose values say when and where something was made."""

Found = Iterator[tuple[str, Any]]


def models(folder: Path) -> Found:
    """Logits of every mechanism, and the losses of its first 20 steps on a puzzle."""
    names = ["vanilla", *(known().keys() - set(DEFAULTS.values())), *COMPOSED]
    cases = {name: parse_mechanism(name) for name in names}
    cases |= {name: parse_mechanism(mechanism) | options for name, (mechanism, options) in VARIANTS.items()}
    ids = torch.arange(2 * 23).reshape(2, 23) * 7 % 61
    for name, keys in sorted(cases.items()):
        torch.manual_seed(0)
        model = FathomForCausalLM(FathomConfig(**SHAPE, **keys)).eval()
        stir(model)
        with torch.no_grad():
            yield f"{name}: logits", summary(model(ids, use_cache=False).logits)
        recipe = parse_recipe(
            {
                "model": {**SHAPE, **keys},
                "data": PUZZLE,
                "optim": {"name": "muon" if name in COMPOSED else "adamw", "lr": 5e-3, "warmup": 0.1},
                "evaluate": {"position_buckets": 1},
                "train": {"steps": 20, "tokens_per_step": 80, "micro_batch": 8, "device": "cpu", "export": False},
            }
        )
        training = build_training(recipe)
        yield f"{name}: losses", [float(training.step(step).loss) for step in range(20)]


def shards(folder: Path) -> Found:
    """Files of `fathom prepare`: two domains, a tokenizer of their own."""
    for name, count in (("rivers", 60), ("seas", 30)):
        write_lines(folder / f"{name}.jsonl", [prose(100 * len(name) + i) for i in range(count)])
    inputs = [f"{name}={folder / f'{name}.jsonl'}" for name in ("rivers", "seas")]
    out = folder / "out"
    run("prepare", *inputs, "--train-tokenizer", "300", "--held-out", "0.2", "--workers", "1", "--out", str(out))
    yield from files(out)


def corpus(folder: Path) -> Found:
    """Files of `fathom corpus`: duplicates, a leak, a short document and a replay collection."""
    texts = [prose(i, 150) for i in range(50)]
    leak = " ".join(prose(999, 40).split()[:20])
    write_lines(folder / "domain.jsonl", [*texts, *texts[:3], f"{texts[4]} and so on", "short", f"{leak} {prose(70)}"])
    write_lines(folder / "replay.jsonl", [prose(200 + i, 150) for i in range(25)])
    (folder / "quiz.jsonl").write_text(json.dumps({"id": "leaked", "question": leak}) + "\n")
    recipe = {
        "collections": {
            "domain": {"inputs": [str(folder / "domain.jsonl")], "license": "CC0-1.0"},
            "replay": {"inputs": [str(folder / "replay.jsonl")]},
        },
        "decontaminate": {"benchmarks": {"quiz": str(folder / "quiz.jsonl")}},
        "tokenize": {"train": 300, "held_out": 0.1},
        "mix": {"block": 64},
        "executor": {"workers": 1},
    }
    (folder / "corpus.yaml").write_text(json.dumps(recipe))
    out = folder / "out"
    report = json.loads(run("corpus", str(folder / "corpus.yaml"), "--out", str(out), "--json"))
    yield "report", bare(report)
    for part in ("shards", "mixture.json", "mixture.u8"):
        yield from files(out, part)


def experiments(folder: Path) -> Found:
    """Reports of a comparison and of a ladder; what would train writes the loss of a planted law."""
    base = {
        "model": {**SHAPE, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2},
        "data": PUZZLE,
        "optim": {"lr": 1e-2, "weight_decay": 0.1},
        "train": {"steps": 4, "tokens_per_step": 80, "micro_batch": 8, "device": "cpu", "export": False},
        "evaluate": {"every": 0, "tokens": 640, "position_buckets": 1},
    }
    rules = {
        **{"layers": [2, 2, 3, 4], "hidden": [16, 24, 32, 48], "seeds": [5, 3, 3, 2], "pairs": 0},
        **{"lr_exponents": [0, 0, 0], "tune_points": [3, 3], "tune_seeds": [2, 1]},
    }
    recipe, ladder = folder / "recipe.yaml", folder / "ladder.yaml"
    recipe.write_text(json.dumps(base))
    ladder.write_text(json.dumps({**base, "ladder": rules}))
    arms = "vanilla,depth_attention,uniform_depth"
    with mock.patch("fathom.experiments.scheduler.train", planted):
        words = ["--arms", arms, "--seeds", "4", "--pairs", "0", "--out", str(folder / "compared"), "--json"]
        report = json.loads(run("compare", str(recipe), *words))
        yield "compare: verdict", report["verdict"]
        yield "compare: differences", [bare(arm.get("difference")) for arm in report["arms"]]
        yield "compare: between", bare(report["between"])
        yield "compare: parameters, FLOPs", [[arm["parameters"], arm["training_flops"]] for arm in report["arms"]]
        words = ["--arms", "vanilla,depth_attention", "--out", str(folder / "climbed"), "--json"]
        report = json.loads(run("ladder", str(ladder), *words))
    yield "ladder: verdict", report["verdict"]
    yield "ladder: rates", bare(report["tuning"])
    yield "ladder: law", bare(report["law"])
    yield "ladder: prediction", bare(report["prediction"])
    for arm in report["arms"]:
        for key in ("multiplier", "per_decade", "flags", "check"):
            yield f"ladder: {arm['name']}, {key}", bare(arm[key])


def lineage(folder: Path) -> Found:
    """Reports on a child, a child in disguise, and a stranger."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    shape = {**SHAPE, "hidden_size": 64, "head_dim": 16, "intermediate_size": 160, "vocab_size": 256}

    def written(name: str, seed: int, noise: int | None = None) -> str:
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False))
        stir(model, seed)
        if noise is not None:
            stir(model, noise, 0.002)
        model.save_pretrained(folder / name)
        return str(folder / name)

    parent, child, stranger = written("parent", 1), written("child", 1, 5), written("stranger", 2)
    disguised = str(folder / "disguised")
    run("lineage", "attack", child, "--out", disguised, "--kind", "permute", "rotate", "scale")
    for name, other in (("child", child), ("disguised", disguised), ("stranger", stranger)):
        report = json.loads(run("lineage", "compare", parent, other, "--mode", "exact", "--nonce", "0", "--json"))
        for key in ("verdict", "scores", "tests", "tampering"):
            yield f"{name}: {key}", report.get(key)


def caches(folder: Path) -> Found:
    """Sixteen tokens after a long context, under every compressed cache, and under none."""
    shape = {**SHAPE, "head_dim": 16, "initializer_range": 0.3}
    ids = torch.arange(150)[None] * 11 % 61
    for name in ("full", *sorted(METHODS)):
        torch.manual_seed(0)
        model = FathomForCausalLM(FathomConfig(**shape)).eval()
        stir(model)
        options = {} if name == "full" else {"window": 64}
        try:
            cache = build_cache(model, name, **options)
        except (TypeError, ValueError) as error:
            yield f"{name}: refused", str(error)
            continue
        with torch.no_grad():
            prefill(model, ids[:, :-1], cache)
            token, chosen = ids[:, -1:], []
            for _ in range(16):
                logits = model(token, past_key_values=cache).logits[:, -1:]
                token = logits.argmax(-1)
                chosen.append(int(token))
        yield f"{name}: tokens", chosen
        yield f"{name}: logits", summary(logits)
        yield f"{name}: bytes", int(cache_bytes(cache))


def answers(folder: Path) -> Found:
    """Status and body of fifty requests, some of which are refused."""
    import uvicorn

    from fathom.inference import server

    model, tokenizer = served_model(folder)
    service = server.Service(model, tokenizer, "tiny", memory=1 << 24)
    running = uvicorn.Server(uvicorn.Config(server.build_app(service), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        for number, (method, path, body) in enumerate(requests()):
            yield f"{number:02} {method} {path}", ask(port, method, path, body)
    finally:
        running.should_exit = True
        thread.join()
        service.engine.join(10)


def requests() -> list[tuple[str, str, dict[str, Any] | None]]:
    """What is asked of the server."""
    talk = [{"role": "user", "content": "how deep is the river"}]
    made: list[tuple[str, str, dict[str, Any] | None]] = [
        *(("GET", path, None) for path in ("/health", "/v1/models", "/v1/models/tiny", "/v1/models/none", "/nowhere")),
        ("POST", "/tokenize", {"prompt": "the lead and the line"}),
        ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    ]
    for i in range(13):
        made.append(("POST", "/v1/completions", {"prompt": f"the depth {i}", "max_tokens": 8, "temperature": 0}))
    for i in range(6):
        made.append(("POST", "/v1/completions", {"prompt": "lead", "max_tokens": 8, "temperature": 1, "seed": i}))
    for extra in (
        *({"echo": True}, {"n": 2}, {"logprobs": 2}, {"stop": ["e"]}, {"stream": True}, {"prompt": ["a", "b"]}),
        *({"top_p": 0.5, "seed": 1}, {"max_tokens": -1}, {"temperature": -1}, {"model": "none"}, {"best_of": 3}),
        *({"prompt": [1, 2, 3]}, {"prompt": ""}, {"logit_bias": {"5": 100}}, {"nonsense": 1}),
    ):
        body = {"prompt": "the sailors", "max_tokens": 6, "temperature": 0, **extra}
        made.append(("POST", "/v1/completions", body))
    for extra in (
        *({}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "seed": 1, "temperature": 1}),
        *({"messages": []}, {"messages": [{"role": "nobody", "content": "x"}]}, {"tools": [{"type": "function"}]}),
        *({"stop": "a"}, {"max_completion_tokens": 3}),
    ):
        body = {"messages": talk, "max_tokens": 6, "temperature": 0, **extra}
        made.append(("POST", "/v1/chat/completions", body))
    return made[:50]


def ask(port: int, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """Status and answer; of a stream its events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        text = None if body is None else json.dumps({"model": "tiny", **body})
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = answer.read().decode()
    finally:
        connection.close()
    lines = [line.removeprefix("data: ") for line in found.splitlines() if line and line != "data: [DONE]"]
    return [answer.status, *(bare(json.loads(line)) for line in lines)]


def served_model(folder: Path) -> tuple[Any, Any]:
    """A random model and a tokenizer of three sentences."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    from fathom.checkpoints.open import open_checkpoint

    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([prose(i) for i in range(5)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[0], pad_token=special[0])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 320, "initializer_range": 0.6}
    model = FathomForCausalLM(FathomConfig(**shape, **parse_mechanism("depth_attention")))
    export(model, folder / "model", tokenizer)
    return open_checkpoint(folder / "model", "cpu")


SECTIONS: dict[str, Callable[[Path], Found]] = {
    made.__name__: made for made in (models, shards, corpus, experiments, lineage, caches, answers)
}


def planted(recipe: Recipe, run_dir: Path, **_: object) -> TrainResult:
    """In place of training: the loss that a power law, a bowl in doublings of the rate and the seed give."""
    mixer = recipe.config().mixer
    gain, best = {"depth_attention": (1.5, 2e-2), "uniform_depth": (1.2, 1e-2)}.get(mixer, (1.0, 1e-2))
    x = math.log(training_flops(recipe) * gain / 1e9)
    off = math.log2(recipe.optim.lr / best)
    data, own = (
        np.random.default_rng(zlib.crc32(repr(part).encode())).normal()
        for part in (recipe.data_seed, (recipe.train.seed, mixer, recipe.train.steps, round(off, 3)))
    )
    loss = 1.7 + 2.6 * math.exp(-0.15 * x) + 0.02 * off**2 + 0.002 * float(0.7 * data + 0.7 * own)
    score = {"loss": loss, "bits_per_byte": loss / math.log(2), "tokens": 10, "accuracy": 0.5}
    evaluation = {
        **score,
        "perplexity": math.exp(loss),
        "domains": dict.fromkeys([f"z60-{level}" for level in (2, 4)], score),
        "position_loss": [loss],
        "trips": None,
    }
    values = {"step": recipe.train.steps, "tokens": 1, "seconds": 0.0, "epochs": 0.0, "evaluation": evaluation}
    (run_dir / RECIPE).write_text(recipe.to_yaml())
    line = {"step": recipe.train.steps, "loss": loss, "tokens": 1, "seconds": 0.0, "val/loss": loss}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run_dir / RESULT).write_text(json.dumps(values))
    return TrainResult(run_dir, recipe.train.steps, True, 1, 0.0)


def run(*words: str) -> str:
    """What a command prints; it must end well."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = fathom(list(words))
    if code:
        raise SystemExit(f"fathom {' '.join(words)} ended with {code}: {errors.getvalue().strip()[-400:]}")
    return out.getvalue()


def stir(model: torch.nn.Module, seed: int = 0, size: float = 0.05) -> None:
    """Move every parameter from its initial value, as training would."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=draw)


def summary(values: torch.Tensor) -> list[float]:
    """Sums of a tensor that a change of any entry moves, and the last eight entries."""
    flat = values.double().flatten()
    weights = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    return [float(flat.sum()), float(flat.abs().sum()), float(flat @ weights), *flat[-8:].tolist()]


WORDS = "the,depth,of,a,river,is,measured,with,rope,and,lead,or,with,sound,in,fathoms,and,in,feet,by,sailors"


def prose(seed: int, words: int = 60) -> str:
    """A document of sentences that no other seed gives."""
    chance = random.Random(seed)
    own = [*WORDS.split(","), *("".join(chance.choices("abcdefghijklmnoprstuvw", k=6)) for _ in range(200))]
    sentences = [" ".join(chance.choices(own, k=12)).capitalize() + "." for _ in range(-(-words // 12))]
    return "\n\n".join(" ".join(sentences[at : at + 4]) for at in range(0, len(sentences), 4))


def write_lines(path: Path, texts: Sequence[str]) -> None:
    """Texts as JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def files(folder: Path, part: str = "") -> Found:
    """SHA-256 of each file of a part of a folder; JSON is hashed without what says when and where it was made."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or not name.startswith(part):
            continue
        data = path.read_bytes().replace(str(folder.parent).encode(), b"HERE")
        if path.suffix == ".json":
            data = json.dumps(bare(json.loads(data)), sort_keys=True).encode()
        yield name, hashlib.sha256(data).hexdigest()[:16]


def bare(value: Any) -> Any:
    """A value without what says when and where it was made."""
    if isinstance(value, dict):
        return {key: bare(one) for key, one in value.items() if key not in MOMENT}
    return [bare(one) for one in value] if isinstance(value, list | tuple) else value


def written(value: Any) -> Any:
    """A value as golden.json holds it."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): written(one) for key, one in value.items()}
    return [written(one) for one in value] if isinstance(value, list | tuple) else value


def apart(one: Any, other: Any, place: str) -> Iterator[str]:
    """Where two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                yield f"{place}: {key} is {'new' if key in other else 'gone'}"
            else:
                yield from apart(one[key], other[key], f"{place}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from apart(*pair, f"{place}/{i}")
    elif not same(one, other):
        yield f"{place}: {str(one)[:200]} -> {str(other)[:200]}"


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, numbers that are not whole to five digits."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=TINY)
    return type(one) is type(other) and one == other


def main() -> int:
    """Write the golden file, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with golden.json; exit code 1 on a difference")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        parser.error(f"--only {','.join(unknown)}: allowed: {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    kept = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    made, differing = dict[str, Any](), list[str]()
    for name in wanted:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as place:
            made[name] = written(dict(SECTIONS[name](Path(place))))
        found = list(apart(kept.get(name, {}), made[name], name))
        differing += found
        print(f"{name}: {len(found)} differ, {time.process_time() - began:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(differing) or "golden")
    if options.check:
        return int(bool(differing))
    whole = {name: made.get(name, kept.get(name, {})) for name in SECTIONS}
    GOLDEN.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
