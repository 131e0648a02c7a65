"""A folder of good things and of everything that can be wrong with them, for command lines to be tried on."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from fathom.recipe import parse_recipe
from fathom.training import train
from tests.tiny import export_tiny, make_corpus, tiny_recipe

LINE = b'{"text": "the depth of a river is measured with rope and lead"}\n'


def make(place: Path) -> None:
    """Everything that the cases name, below one folder."""
    (place / "corpus").mkdir()
    make_corpus(place / "corpus")
    os.chdir(place)
    _texts(place)
    _tokenizers(place)
    _corpora(place)
    _recipes(place)
    _models(place)
    _runs(place)
    _lineage(place)
    (place / "folder").mkdir()
    (place / "full").mkdir()
    (place / "full" / "note.txt").write_text("mine")
    (place / "file").write_text("mine")


def copy(place: Path, source: str, name: str, change: Callable[[Path], object]) -> None:
    """A copy of a directory with one thing wrong."""
    shutil.copytree(place / source, place / name, ignore=shutil.ignore_patterns("*.py"))
    change(place / name)


def edit(file: str, **keys: object) -> Callable[[Path], object]:
    """A change: other values in a JSON file; None takes a key out."""

    def change(directory: Path) -> None:
        path = directory / file
        values = {**json.loads(path.read_text()), **keys}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def write(file: str, text: str | bytes) -> Callable[[Path], object]:
    """A change: a file's whole content."""
    content = text if isinstance(text, bytes) else text.encode()
    return lambda directory: (directory / file).write_bytes(content)


def cut(file: str, size: int) -> Callable[[Path], object]:
    """A change: the first bytes of a file alone, or with a negative size all but the last."""
    return lambda directory: (directory / file).write_bytes((directory / file).read_bytes()[:size])


def gone(file: str) -> Callable[[Path], object]:
    """A change: a file less."""
    return lambda directory: (directory / file).unlink()


def flipped(pattern: str) -> Callable[[Path], object]:
    """A change: one bit of the first file of a pattern."""

    def change(directory: Path) -> None:
        path = sorted(directory.glob(pattern))[0]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return change


def _texts(place: Path) -> None:
    contents = {
        "good.jsonl": LINE * 40,
        "good.txt": b"The sailors let the lead fall into the dark water.\n" * 30,
        "empty.jsonl": b"",
        "empty.txt": b"",
        "blank.txt": b" \n\n\t\n",
        "broken.jsonl": LINE * 3 + b'{"text": "no end\n' + LINE,
        "list.jsonl": b'["text"]\n',
        "number.jsonl": b'{"text": 5}\n',
        "null.jsonl": b'{"text": null}\n',
        "other.jsonl": b'{"body": "text"}\n',
        "word.jsonl": b"text\n",
        "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "latin.jsonl": '{"text": "Lot und Fäden"}\n'.encode("latin-1"),
        "utf16.txt": "Lot".encode("utf-16"),
        "latin.txt": "Fäden".encode("latin-1"),
        "zeros.jsonl": bytes(100),
        "surrogate.jsonl": b'{"text": "a \\ud800 b", "domain": "x"}\n',
        "domain.jsonl": b'{"text": "a", "domain": "a\\ud800"}\n',
        "long.jsonl": b'{"text": "' + b"deep " * 800_000 + b'"}\n',
        "plain.gz": LINE,
        "plain.jsonl.gz": LINE,
        "cut.jsonl.gz": gzip.compress(LINE * 1000)[:-20],
        "plain.jsonl.bz2": LINE,
        "cut.jsonl.bz2": bz2.compress(LINE * 1000)[:-20],
        "plain.jsonl.xz": LINE,
        "cut.jsonl.xz": lzma.compress(LINE * 1000)[:-20],
        "plain.jsonl.zst": LINE,
        "packed.jsonl": gzip.compress(LINE * 40),
        "packed.txt": lzma.compress(LINE * 40),
        "plain.parquet": LINE,
        "empty.parquet": b"",
        "plain.arrow": LINE,
        "good.pdf": b"%PDF-1.4",
        "bomb.jsonl.gz": gzip.compress(b'{"text": "' + bytes(40_000_000), 9),
        "prompts.jsonl": b'{"prompt": "The"}\n',
        "chatless.jsonl": b'{"question": "The"}\n',
        "cloze.jsonl": b'{"question": "The"}\n',
    }
    for name, content in contents.items():
        (place / name).write_bytes(content)
    (place / "dangling.jsonl").symlink_to("nowhere.jsonl")
    os.mkfifo(place / "pipe.jsonl")


def _tokenizers(place: Path) -> None:
    shutil.copytree(place / "corpus/out/tokenizer", place / "words")
    whole = json.loads((place / "words/tokenizer.json").read_text())
    (place / "nameless.json").write_text(json.dumps({**whole, "added_tokens": []}))
    (place / "cut.json").write_bytes((place / "words/tokenizer.json").read_bytes()[:500])
    (place / "empty.json").write_text("{}")
    (place / "noise.model").write_bytes(b"\xff" * 64)
    (place / "empty.model").write_bytes(b"")
    (place / "pickled.json").write_bytes(pickle.dumps({"a": 1}))
    copy(place, "words", "words_cut", cut("tokenizer.json", 500))
    copy(place, "words", "words_settings", write("tokenizer_config.json", "{"))
    copy(place, "words", "words_class", edit("tokenizer_config.json", tokenizer_class="Stranger"))


def _corpora(place: Path) -> None:
    home = "corpus/out"
    copy(place, home, "corpus_flipped", flipped("train/*/*.bin"))
    copy(place, home, "corpus_cut", lambda d: cut(str(next(d.glob("train/*/*.bin")).relative_to(d)), 10)(d))
    copy(place, home, "corpus_gone", lambda d: next(d.glob("train/*/*.bin")).unlink())
    copy(place, home, "corpus_index", write("index.json", "{"))
    copy(place, home, "corpus_other", write("index.json", "[]"))
    copy(place, home, "corpus_version", edit("index.json", version=99))
    copy(place, home, "corpus_edited", edit("index.json", eos_token_id=1))
    copy(place, home, "corpus_wordless", lambda d: shutil.rmtree(d / "tokenizer"))
    (place / "begun/.prepare").mkdir(parents=True)


def _recipes(place: Path) -> None:
    recipe = tiny_recipe(Path("corpus/out"))
    (place / "good.yaml").write_text(recipe.to_yaml())
    contents = {
        "empty.yaml": b"",
        "list.yaml": b"- optim\n",
        "text.yaml": b"optim\n",
        "broken.yaml": b"optim: {lr: 1\n",
        "tabs.yaml": b"optim:\n\tlr: 1\n",
        "binary.yaml": bytes(range(256)),
        "zeros.yaml": bytes(20),
        "unsafe.yaml": b"optim: !!python/object/apply:os.getcwd []\n",
        "circle.yaml": b"base: circle.yaml\n",
        "baseless.yaml": b"base: nowhere.yaml\n",
        "basefolder.yaml": b"base: folder\n",
        "basenumber.yaml": b"base: 5\n",
        "keyless.yaml": b"5: 6\n",
        "section.yaml": b"optim: 5\n",
        "inner.yaml": b"optim: {5: 6}\n",
        "model.yaml": b"model: [1]\n",
        "modelkey.yaml": b"model: {5: 6}\n",
        "deep.yaml": b"optim: " + b"[" * 5000,
        "aliases.yaml": b"a: &a [x, x]\n"
        + b"".join(b"%c: &%c [*%c, *%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(24)),
    }
    for name, content in contents.items():
        (place / name).write_bytes(content)


def _models(place: Path) -> None:
    export_tiny(place / "model", chat=False)
    export_tiny(place / "plain", chat=False, mixer="none")
    changes: dict[str, Callable[[Path], object]] = {
        "config_cut": cut("config.json", 40),
        "config_list": write("config.json", "[]"),
        "config_empty": write("config.json", ""),
        "config_binary": write("config.json", bytes(range(256))),
        "config_twice": write("config.json", '{"model_type": "fathom", "model_type": "fathom"}'),
        "config_deep": write("config.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "config_hidden": edit("config.json", hidden_size="wide"),
        "config_minus": edit("config.json", hidden_size=-32),
        "config_wider": edit("config.json", hidden_size=64),
        "config_layers": edit("config.json", num_hidden_layers=5),
        "config_mixer": edit("config.json", mixer="blender"),
        "config_option": edit("config.json", mixer_options={"strid": 2}),
        "config_act": edit("config.json", hidden_act="nope"),
        "config_rope": edit("config.json", rope_parameters={"rope_type": "nope"}),
        "config_rope_text": edit("config.json", rope_parameters="nope"),
        "config_yarn": edit("config.json", rope_parameters={"rope_type": "yarn"}),
        "config_dtype": edit("config.json", dtype="float77"),
        "config_type": edit("config.json", model_type="stranger", architectures=["Stranger"]),
        "config_typeless": edit("config.json", model_type=None),
        "config_number": edit("config.json", model_type=5),
        "config_context": edit("config.json", max_position_embeddings="long"),
        "config_attention": edit("config.json", attn_implementation="nope"),
        "config_kvcache": edit("config.json", kvcache="freqkv"),
        "config_eos": edit("config.json", eos_token_id="end"),
        "weights_cut": cut("model.safetensors", -100),
        "weights_head": cut("model.safetensors", 200),
        "weights_empty": write("model.safetensors", b""),
        "weights_noise": write("model.safetensors", b"\xff" * 1000),
        "weights_huge": write("model.safetensors", struct.pack("<Q", 1 << 62) + bytes(64)),
        "weights_gone": gone("model.safetensors"),
        "weights_pickle": lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "weights_folder": lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").mkdir()),
        "weights_index": write("model.safetensors.index.json", "{"),
        "weights_map": write("model.safetensors.index.json", '{"weight_map": 5}'),
        "tokenizer_cut": cut("tokenizer.json", 500),
        "tokenizer_empty": write("tokenizer.json", "{}"),
        "tokenizer_list": write("tokenizer.json", "[]"),
        "tokenizer_gone": lambda d: [path.unlink() for path in d.glob("tokenizer*")],
        "tokenizer_settings": write("tokenizer_config.json", "{"),
        "tokenizer_class": edit("tokenizer_config.json", tokenizer_class="Stranger"),
        "generation_cut": write("generation_config.json", "{"),
        "generation_list": write("generation_config.json", "[]"),
        "generation_text": edit("generation_config.json", temperature="hot", do_sample=True),
        "adapter": write("adapter_config.json", '{"base_model_name_or_path": "someone/else"}'),
    }
    for name, change in changes.items():
        copy(place, "model", f"bad/{name}", change)


def _runs(place: Path) -> None:
    recipe = parse_recipe(tiny_recipe(Path("corpus/out")).to_dict(), ("train.steps=2", "train.checkpoint_every=1"))
    train(recipe, Path("run"))
    changes: dict[str, Callable[[Path], object]] = {
        "recipe_cut": write("recipe.yaml", "optim: {"),
        "recipe_empty": write("recipe.yaml", ""),
        "recipe_key": write("recipe.yaml", "optim: {lrr: 1}\n"),
        "result_cut": write("result.json", "{"),
        "result_list": write("result.json", "[]"),
        "metrics": write("metrics.jsonl", b"\xff\xfe\n"),
        "damaged": lambda d: [flipped("*.safetensors")(path) for path in sorted(d.glob("step-*"))],
        "manifests": lambda d: [(path / "manifest.json").write_text("[]") for path in sorted(d.glob("step-*"))],
        "trainers": lambda d: [(path / "trainer.json").write_text("{") for path in sorted(d.glob("step-*"))],
        "weightless": lambda d: [shutil.rmtree(path) for path in sorted(d.glob("step-*"))],
    }
    for name, change in changes.items():
        copy(place, "run", f"runs/{name}", change)
    plan = {"arms": [], "seeds": [0], "equal": "tokens", "pairs": 0, "recipe": recipe.to_dict()}
    arm = {"name": "a", "mechanism": "vanilla", "overrides": []}
    plans = {
        "cut": "{",
        "list": "[]",
        "keyless": "{}",
        "armless": json.dumps(plan),
        "arm": json.dumps({**plan, "arms": [{"name": "a"}]}),
        "mechanism": json.dumps({**plan, "arms": [arm, {**arm, "name": "b", "mechanism": "blender"}]}),
        "seeds": json.dumps({**plan, "arms": [arm, {**arm, "name": "b"}], "seeds": "many"}),
        "equal": json.dumps({**plan, "arms": [arm, {**arm, "name": "b"}], "equal": "love"}),
        "recipe": json.dumps({**plan, "arms": [arm, {**arm, "name": "b"}], "recipe": {"optim": {"lr": -1}}}),
        "recipes": json.dumps({**plan, "arms": [arm, {**arm, "name": "b"}], "recipe": 5}),
    }
    for name, text in plans.items():
        (place / "plans" / name).mkdir(parents=True)
        (place / "plans" / name / "plan.json").write_text(text)
    reports = {
        "cut": "{",
        "list": "[]",
        "empty": "{}",
        "armless": '{"arms": []}',
        "runless": '{"arms": [{"runs": []}]}',
    }
    for name, text in {**reports, "elsewhere": json.dumps({"arms": [{"runs": [{"loss": 1}], "loss": 1}]})}.items():
        (place / "reports" / name).mkdir(parents=True)
        (place / "reports" / name / "report.json").write_text(text)
    kept = place / "kept" / place.name / ".done"  # of `model`, which goes by the name of its folder
    kept.mkdir(parents=True)
    (kept / "perplexity-good.json").write_text("{")
    (place / "unfinished").mkdir()
    (place / "unfinished/recipe.yaml").write_text(recipe.to_yaml())
    (place / "small.yaml").write_text(parse_recipe({}).to_yaml())


def _lineage(place: Path) -> None:
    statements = {
        "cut.statement": "{",
        "list.statement": "[]",
        "empty.statement": "{}",
        "report.statement": '{"fathom_lineage_report": 1}',
        "report9.statement": '{"fathom_lineage_report": 99}',
        "null.statement": '{"fathom_lineage_null": 1}',
        "cut.card": "{",
        "empty.card": "{}",
        "list.card": "[]",
    }
    for name, text in statements.items():
        (place / name).write_text(text)
    (place / "noise.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    (place / "empty.gguf").write_bytes(b"")
    (place / "other.gguf").write_bytes(b"NOPE" * 10)
    (place / "noise.safetensors").write_bytes(b"\xff" * 100)
    (place / "library").mkdir()
    (place / "library/cut.card").write_text("{")
