"""What the documents tell a reader to type works, in the order in which they say it.

Every page is followed in a working directory of its own, in which the names that it takes for granted exist at
miniature size: recipes of the same names, corpora, runs, tokenizers. Commands run in this process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import glob
import io
import json
import lzma
import random
import re
import runpy
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fathom.cli import main as cli
from fathom.cli.lineage import ACTIONS
from fathom.cli.parser import Parser
from fathom.corpus.prepare import prepare
from fathom.data.tokenizer import train_bpe
from fathom.evaluation.caches import evaluate as cache_evaluation
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import MECHANISMS
from fathom.recipe import describe, load_recipe, parse_recipe
from fathom.settings import read_values
from tests.processes import Command
from tests.session import Sessions

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("recipes", "benchmarks", "tests/outside")),
    ROOT / "CONTRIBUTING.md",
]
# The command that a page is about, if it is not called after it: whose flags it means when it names one alone.
SUBJECT = {
    "training": "train",
    "nodes": "train",
    "data": "prepare",
    "conversations": "corpus",
    "specialise": "evaluate",
    "evaluate_base": "evaluate",
    "serving": "serve",
    "lineage_publish": "lineage",
    "recipes": "train",
    "first_model": "train",
}
FOREIGN = ("vllm ", "lm_eval ", "trl ", "hf ", "pip ", "pytest ", "make ", "ruff ")  # programs of others
COMMAND = re.compile(r"(fathom|torchrun|make|python benchmarks/\S+\.py)( |$)")
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

# Mechanisms that a page writes as a file of the package.
WRITTEN = {"CONTRIBUTING": "neighbour_mean"}
STANDS_FOR_ANY = "NAME"

TEXT = "the depth of a river is measured with rope and lead or with sound in fathoms and in feet"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# A run of a second, and every key as the recipe has it otherwise. Six layers: docs/how-to/lens.md looks at visit 5.
MICRO = {
    "model.num_hidden_layers": 6,
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
    "model.head_dim": 8,
    "model.vocab_size": 320,
    "model.max_position_embeddings": 512,
    "data.sequence_length": 64,
    "train.steps": 2,
    "train.tokens_per_step": 128,
    "train.micro_batch": 2,
    "train.precision": "fp32",
    "train.compile": "false",
    "train.device": "cpu",
    "train.checkpoint_every": 2,
    "train.log_every": 1,
    "evaluate.every": 2,
    "evaluate.tokens": 512,
    "track.display": "none",
}
# What a documented program does at length, done briefly.
BRIEFLY = {
    '"cuda"': '"cpu"',
    "stop_step=1000": "stop_step=2",
    "1_000_000": "2_000",
    "=4096": "=300",
    "tokenizer=1024": "tokenizer=300",
    'load_recipe("demo"': 'load_recipe("recipes/demo.yaml"',
}


@dataclass(frozen=True)
class Item:
    """A command or a Python block, and where it stands."""

    page: Path
    line: int
    kind: str  # "shell", "python", or "printed": what the steps before it printed
    text: str

    def __str__(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page}:{self.line}: {self.text.splitlines()[0]}"


def items(page: Path) -> list[Item]:
    """The commands and Python blocks of a page, in order."""
    found = []
    for language, line, body in fences(page):
        if language == "python":
            found.append(Item(page, line, "python", body))
            continue
        if language == "text":
            if shown := [words for words in body.splitlines() if is_output(words)]:
                found.append(Item(page, line, "printed", "\n".join(shown)))
            continue
        joined = re.sub(r"\\\n\s*", lambda match: " " + "\0" * match.group().count("\n"), body)
        for text in joined.splitlines():
            words = text.replace("\0", "").removeprefix("$ ").strip()
            if COMMAND.match(words):
                found.append(Item(page, line, "shell", words))
            line += 1 + text.count("\0")
    return found


def is_output(line: str) -> bool:
    """Whether a line of a text block was printed by a program; a model's own words begin with a space."""
    return bool(line) and not line.startswith((" ", "$ ", "fathom ", *FOREIGN))


def shape(line: str) -> str:
    """A line without its numbers; a value after one word and a colon or an equals sign is left out too."""
    words = " ".join(word for word in line.split() if not re.search(r"\d", word))
    return re.sub(r"^(\w+)(:| =).*", r"\1", words)


def fences(page: Path) -> Iterator[tuple[str, int, str]]:
    """Language, first line and body of every fenced block."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        yield match[1], text.count("\n", 0, match.start(2)) + 1, match[2]


def words_of(item: Item) -> list[str]:
    return shlex.split(item.text, comments=True)


def name_of(page: Path) -> str:
    return page.parent.name if page.parent.name in ("recipes", "benchmarks", "results") else page.stem


# Commands.


@pytest.fixture(scope="module")
def parsers() -> dict[str, Parser]:
    """The parser of every command, after its `--help` was shown and ended well."""
    seen: dict[str, Parser] = {}
    with pytest.MonkeyPatch.context() as patch:
        plain = Parser.parse_known_args

        def parse(self, *given, **settings):  # which the parser of a command's command is sent to as well
            seen[self.prog.removeprefix("fathom").strip()] = self
            return plain(self, *given, **settings)

        patch.setattr(Parser, "parse_known_args", parse)
        patch.setattr(sys, "stdout", io.StringIO())
        for name in ["", *cli.COMMANDS, *(f"lineage {name}" for name in ACTIONS)]:
            with pytest.raises(SystemExit) as ended:
                cli.main([*name.split(), "--help"])
            assert ended.value.code == 0, name
    return seen


def known_flags(parser) -> set[str]:
    return set(parser._option_string_actions)


class Parsed(Exception):
    """The arguments mean something; nothing was done."""


def check_arguments(words: list[str]) -> None:
    """Parse and stop."""
    with pytest.MonkeyPatch.context() as patch:
        for method in ("parse_args", "parse_intermixed_args"):
            plain = getattr(Parser, method)

            def parse(self, given, plain=plain):
                options = plain(self, given)
                if self.prog != "fathom":
                    raise Parsed
                return options

            patch.setattr(Parser, method, parse)
        with pytest.raises(Parsed):
            assert cli.main(words) == 0


def fathom_words(words: list[str]) -> list[str] | None:
    """What `fathom` is given, whoever starts it; None if it is not `fathom` that is started."""
    if words[0] == "fathom":
        return words[1:]
    module = next((i for i in range(1, len(words)) if words[i - 1 : i + 1] == ["-m", "fathom"]), None)
    return None if module is None else words[module + 1 :]


def command_of(words: list[str]) -> str:
    both = " ".join(words[:2])
    return both if words[:1] == ["lineage"] or both in cli.COMMANDS else words[0]


# The working directory.


def sentence(chance: random.Random, count: int = 60) -> str:
    return f"{chance.random():.6f} " + " ".join(chance.choices(TEXT.split(), k=count))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a page may name and does not make."""
    here = tmp_path_factory.mktemp("docs")
    chance = random.Random(0)

    def lines(path: str, count: int, field: str = "text") -> None:
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        body = "".join(json.dumps({field: sentence(chance)}) + "\n" for _ in range(count)).encode()
        (here / path).write_bytes(lzma.compress(body) if path.endswith(".xz") else body)

    def files(folder: str, suffix: str, count: int, words: int = 80) -> None:
        (here / folder).mkdir(parents=True)
        for number in range(count):
            (here / folder / f"{number}{suffix}").write_text(sentence(chance, words) + "\n")

    for path in ("corpus/a.jsonl", "corpus/b.jsonl", "wiki-1.jsonl.xz"):
        lines(path, 200)
    lines("wiki-val.jsonl.xz", 6)
    lines("prompts.jsonl", 3, "prompt")
    for folder in ("wiki", "arxiv", "books"):
        lines(f"corpora/{folder}/part.jsonl", 200)
    files("books", ".txt", 6, words=800)  # longer than a window that fills twice
    files("usr/lib/python3.12", ".py", 200)
    (here / "chapter.txt").write_text(sentence(chance, 20))
    files("papers", ".txt", 60, words=120)
    files("docs", ".txt", 60, words=120)
    recipe = next(body for _, _, body in fences(DOCS / "how-to" / "corpus.md") if "geology.yaml" in body)
    (here / "geology.yaml").write_text(recipe.replace("min_words: 20", "min_words: 5"))
    (here / "quiz.jsonl").write_text(
        json.dumps({"question": "how deep is the water below the old bridge today"}) + "\n"
    )

    (here / "talk.jsonl").write_text(
        "".join(
            json.dumps({"instruction": sentence(chance, 8), "output": sentence(chance, 4)}) + "\n" for _ in range(80)
        )
    )
    specialise(here)

    tokenizer = train_bpe((sentence(chance) for _ in range(100)), 300)
    for name in ("EleutherAI/gpt-neox-20b", "Qwen/Qwen3-0.6B-Base", "gpt2"):
        tokenizer.save_pretrained(here / name)
    for path in (ROOT / "recipes").glob("*.yaml"):
        window = ["kvcache.window=32"] if "kvcache:" in path.read_text() else []
        small = [f"{key}={value}" for key, value in MICRO.items()] + window
        (here / "recipes" / path.name).write_text(load_recipe(path, small).to_yaml())

    (here / "recipes/ladders").mkdir()
    for path in (ROOT / "recipes/ladders").glob("*.yaml"):
        (here / "recipes/ladders" / path.name).write_text(small_ladder(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        prepare(["corpus/*.jsonl"], Path("data/tiny"), tokenizer="gpt2", held_out=0.05, workers=1)
        shutil.copytree("data/tiny", "demo/data")
        quiet(["train", "recipes/tiny.yaml", "--run", "runs/tiny"])
        quiet(["train", "recipes/tiny.yaml", "--run", "runs/other", "model.mixer=depth_attention", "train.seed=1"])
        quiet(["train", "recipes/tiny.yaml", "--run", "runs/third", "train.seed=2"])
        quiet(["export", "runs/tiny", "--to", "path/to/qwen3", "--as", "qwen3"])
        shutil.copytree("path/to/qwen3", "models/Qwen3-0.6B-Base")
        shutil.copytree("path/to/qwen3", "path/to/llama")  # its tokenizer, and another family's weights
        vocab = json.loads(Path("path/to/qwen3/config.json").read_text())["vocab_size"]
        llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **llama)).save_pretrained("path/to/llama")
        experts = llama | {"num_experts": 4, "moe_intermediate_size": 16, "num_key_value_heads": 2}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocab, **experts)).save_pretrained("path/to/qwen3-moe")
        smollm2 = here / "HuggingFaceTB/SmolLM2-135M-Instruct"  # as many layers as it has
        shutil.copytree("path/to/llama", smollm2)
        (smollm2 / "weights.sha256").unlink()
        LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **llama | {"num_hidden_layers": 30})).save_pretrained(smollm2)
        (smollm2 / "chat_template.jinja").write_text(CHAT)
    (here / "models/Qwen3-0.6B-Base/chat_template.jinja").write_text(CHAT.replace("\n", "<|endoftext|>\n"))
    for name, of in (("vanilla", "tiny"), ("depth", "other")):
        shutil.copytree(here / "runs" / of, here / "runs" / name, ignore=without_code)
    for name, of in (
        ("A", "tiny"),
        ("B", "other"),
        ("C", "other"),
        ("D", "third"),
        ("M1", "tiny"),
        ("M2", "other"),
        ("M3", "third"),
    ):
        shutil.copytree(here / "runs" / of / "model", here / name, ignore=without_code)
    merged(here)
    (here / "cards").mkdir()
    quiet(["lineage", "card", str(here / "B"), "--out", str(here / "cards" / "B.json")])
    return here


def merged(here: Path) -> None:
    """Two models that share an origin, and their mean."""
    first = load_file(here / "A" / "model.safetensors")
    torch.manual_seed(0)
    second = {name: x + 0.1 * x.std(correction=0) * torch.randn_like(x) for name, x in first.items()}
    mean = {name: (x + second[name]) / 2 for name, x in first.items()}
    for name, tensors in (("P1", first), ("P2", second), ("MERGE", mean)):
        shutil.copytree(here / "A", here / name)
        save_file(tensors, here / name / "model.safetensors", {"format": "pt"})


def specialise(here: Path) -> None:
    """The recipes that the tutorial on experts writes, and the probe: a second each, of whatever model they name."""
    bodies = {
        body.partition("\n")[0].removeprefix("# "): body for _, _, body in fences(DOCS / "tutorials" / "specialise.md")
    }
    (here / "expert.yaml").write_text(bodies["expert.yaml"].replace("max_tokens: 2048", "max_tokens: 64"))
    small = [f"{key}={value}" for key, value in MICRO.items() if not key.startswith("model.")]
    for name in ("continue.yaml", "tune.yaml"):
        (here / name).write_text(bodies[name])
        (here / name).write_text(load_recipe(here / name, small).to_yaml())
    probe = load_recipe(ROOT / "recipes/specialise/probe.yaml", [*small, "train.steps=20"])
    (here / "recipes/specialise").mkdir(parents=True)
    (here / "recipes/specialise/probe.yaml").write_text(probe.to_yaml())


def small_ladder(path: Path) -> str:
    """A ladder file whose runs take a second; a puzzle keeps its row."""
    values = read_values(path)
    rules = values.pop("ladder")
    length = values["data"]["sequence_length"] if "puzzle" in values["data"]["directory"] else 64
    small = {**MICRO, "data.sequence_length": length, "train.tokens_per_step": 2 * length, "train.compile": "false"}
    recipe = parse_recipe(values, [f"{key}={value}" for key, value in small.items()])
    sizes = {"layers": [6, 6, 6][: len(rules["layers"])], "hidden": [16, 24, 32][: len(rules["layers"])]}
    rules |= {**sizes, "seeds": [2, 1, 1][: len(rules["layers"])], "tokens": 4 * length, "tune_points": [3]}
    rules |= {"tune_seeds": [1], "seed_control": [1]}
    return recipe.to_yaml() + json.dumps({"ladder": rules})[1:-1].replace('"ladder"', "ladder", 1) + "\n"


def quiet(words: list[str]) -> None:
    assert cli.main(words) == 0, words


def without_code(folder: str, names: list[str]) -> list[str]:
    """The code in an export, sixty files that nobody reads who has Fathom: not to be copied."""
    return [name for name in names if name.endswith(".py")] if "config.json" in names else []


READ = ("books", "docs", "papers", "usr")
"""Folders of many documents, which no page writes to."""


def left_out(template: Path, folder: str, names: list[str]) -> list[str]:
    """What a page's own copy of the template lacks: folders that it links instead, and code."""
    return [*READ] if Path(folder) == template else without_code(folder, names)


@pytest.fixture
def world(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(template, tmp_path / "here", ignore=lambda folder, names: left_out(template, folder, names))
    for name in READ:
        (tmp_path / "here" / name).symlink_to(template / name)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    small = {path.stem: path for path in (tmp_path / "here" / "recipes").glob("*.yaml")}
    monkeypatch.setattr("fathom.recipe.packaged_recipes", lambda: small)  # a recipe's name means the small one too
    monkeypatch.setattr(cache_evaluation, "QUESTIONS", 4)
    monkeypatch.delenv("FATHOM_API_KEY", raising=False)
    # A conversation of one turn, and as wide a terminal as anybody's.
    monkeypatch.setattr(sys, "stdin", io.StringIO("How deep is it?\n"))
    known = set(MECHANISMS)
    yield tmp_path / "here"
    for added in set(MECHANISMS) - known:
        del MECHANISMS[added]


class Reader:
    """Somebody who types a page, line for line: commands, and Python in a session of its own."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.session = sessions, None
        self.server: Command | None = None
        self.port = 8000
        self.printed: set[str] = set()

    def follow(self, page: Path) -> None:
        steps = items(page)
        for step in steps:
            if step.kind == "shell" and (words := fathom_words(words_of(step))):
                self._forget(words, ("--out", "--run", "-o"))  # the page makes these
        try:
            for step in steps:
                try:
                    self.take(step)
                except (Exception, SystemExit) as error:
                    raise AssertionError(f"{step}\n{type(error).__name__}: {error}") from error
        finally:
            self.stop()

    def take(self, step: Item) -> None:
        """Type one step, or compare what is quoted with what was printed, number for any number."""
        if step.kind == "printed":
            missing = [line for line in step.text.splitlines() if shape(line) not in self.printed]
            assert not missing, f"not printed: {missing}"
            return
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            said = self.python(step) if step.kind == "python" else self.shell(step)
        self.printed |= {shape(line) for line in f"{out.getvalue()}\n{said or ''}".splitlines()}

    def _forget(self, words: list[str], flags: tuple[str, ...]) -> None:
        for flag, path in pairwise(words):
            if flag in flags and Path(path).is_dir() and path != "corpus":
                shutil.rmtree(path)

    def shell(self, step: Item) -> None:
        words = words_of(step)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), "no such target"
            return
        if words[0] == "python":  # its flags are held by another test
            assert (ROOT / words[1]).is_file()
            return
        given = fathom_words(words)
        assert given, "not a command of ours"
        if words[0] == "torchrun":
            from torch.distributed.run import get_args_parser

            parsed = get_args_parser().parse_args(words[1:])
            assert parsed.module and parsed.training_script == "fathom"
            given += ["--dry-run", "data.directory=data/tiny"]
        given = [word for pattern in given for word in self._expand(pattern)]
        network = any(word.startswith("hf:") for word in given) or {"--tasks", "--benchmark"} & set(given)
        # A mechanism that the reader has written; a command that tests/deepen/test_trial.py runs.
        if network or "neighbour_mean" in step.text or given[0] == "try":
            check_arguments(given)
        elif given[0] == "serve":
            self._serve(given)
        else:
            if given[0] == "prepare":  # alternatives: the page shows several ways to fill one directory
                out = Path(given[given.index("--out") + 1])
                shutil.rmtree(out, ignore_errors=True)
                given += ["--workers", "1"]
            if given[0] == "train" and given[1].endswith("heal.yaml"):
                given += [f"{key}={value}" for key, value in MICRO.items() if not key.startswith("model.")]
            if given[0] == "compare" and "--arms" in given:  # one process, few rounds
                given += ["--pairs", "2", "--seeds", "2"] + ["--workers", "1"] * ("--dry-run" not in given)
            assert cli.main(given) == 0, "did not end with 0"

    @staticmethod
    def _expand(word: str) -> list[str]:
        word = word.removeprefix("/") if word.startswith("/usr/lib/") else word
        return sorted(glob.glob(word)) or [word] if "*" in word else [word]

    def _serve(self, given: list[str]) -> None:
        given[given.index("--port") + 1] = "0"
        self.server = Command(given, Path.cwd(), Path.cwd())
        line = self.server.first_line()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert match, line
        self.port = int(match[1])

    def stop(self) -> None:
        if self.session is not None:
            self.session.close()
        if self.server is not None:
            self.server.signal(signal.SIGTERM)
            try:
                assert self.server.wait() == 0
            finally:
                self.server.kill()

    def python(self, step: Item) -> str:
        source = step.text.replace(":8000/", f":{self.port}/")
        for long, short in BRIEFLY.items():
            source = source.replace(long, short)
        if named := re.match(r"# (\w+\.py)\n", source):  # a file that the reader writes
            Path(named[1]).write_text(source)
            return ""
        if "import Trainer" in source and find_spec("accelerate") is None:  # which transformers' Trainer needs
            self.printed.add("λ")
            return ""
        source = "\n" * (step.line - 1) + source
        if mechanism := WRITTEN.get(step.page.stem):
            as_module(mechanism, source, step.page)
            return ""
        self.session = self.session or self.sessions.start(Path.cwd(), {"HF_HUB_OFFLINE": "1"})
        said = self.session.run(source, str(step.page))
        assert "cache.compressions" not in source or not said.startswith("0 "), "nothing was compressed"
        return said


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    running = Sessions()
    yield running
    running.stop()


FOLLOWED = [page for page in PAGES if any(item.kind != "printed" for item in items(page))]
# Pages whose commands measure something, and those of mechanisms, each of which runs a comparison of its own:
# `depth_attention` and `loop` stand for them in the fast tests, `lineage_publish` for lineage, `data` for texts,
# and the README for what is made of a model.
LONG = (
    "evaluate",
    "first_model",
    "lens",
    "own_mechanism",
    "other_tools",
    "gates",
    "lineage_publish",
    "loop",
    "specialise",
    "recurrence",
    "deepen",
    "serving",
    "benchmarks",
    "kvcache",
    "cache",
    "compare",
    "ladder",
    "ponder",
    "ponder2",
    "ponder3",
    "adaponder",
    "latent_cot",
    "hyper_connections",
    "mudd",
    "attention_residuals",
    "denseformer",
    "uniform_depth",
    "value_residual",
    "lineage",
    "corpus",
    "generate",
    "checkpoints",
)


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow) if name_of(p) in LONG else p for p in FOLLOWED], ids=name_of
)
def test_a_page_does_what_it_says(page: Path, world: Path, sessions: Sessions) -> None:
    for name in MADE if page == FIRST else ():  # the first tutorial begins without what it makes for the others
        shutil.rmtree(name)
    Reader(sessions).follow(page)
    assert all(Path(name).is_dir() for name in MADE)


FIRST = DOCS / "tutorials" / "first_model.md"
MADE = ("data/tiny", "runs/tiny", "runs/other")
"""What the first tutorial makes, and other pages use."""


@pytest.mark.parametrize("page", [page for page in FOLLOWED if page.is_relative_to(DOCS)], ids=name_of)
def test_a_page_says_where_its_run_comes_from(page: Path) -> None:
    """One that begins with a run or data of the first tutorial links it."""
    used = any(name in step.text for step in items(page) for name in (*MADE, "recipes/tiny"))
    assert page == FIRST or not used or "first_model.md" in page.read_text(encoding="utf-8")


def test_the_first_tutorial_has_a_tokenizer_for_every_tiny_recipe() -> None:
    (size,) = re.findall(r"--train-tokenizer (\d+)", FIRST.read_text(encoding="utf-8"))
    for path in (ROOT / "recipes").glob("tiny*.yaml"):
        assert load_recipe(path).config().vocab_size >= int(size), path.name


def test_models_open_other_families_wherever_they_are_imported_from(world: Path, sessions: Sessions) -> None:
    session = sessions.start(world, {})
    session.run("from fathom.models import FathomForCausalLM\nFathomForCausalLM.from_pretrained('path/to/llama')")
    session.close()


def test_a_page_that_promises_too_much_is_caught(world: Path, sessions: Sessions) -> None:
    """The negative control: each of these pages has one fault."""
    for fault in (
        "```\nfathom generate runs/tiny 'To fathom is' --loudly\n```\n",
        "```console\n$ fathom train recipes/tiny.yaml optim.speed=3 --run runs/new\n```\n",
        "```\nfathom evaluate runs/tiny \\\n  --perplexity nowhere/\n```\n",
        "```python\nfrom fathom.models import Nothing\n```\n",
        "```python\nimport fathom\n\nfathom.checkpoints.families.known()  # imported by other tests\n```\n",
        "```\nmake haste\n```\n",
        "```\ntorchrun --ranks 8 -m fathom train recipes/3b.yaml\n```\n",
        "```text\nmodel  a thing that nothing printed\n```\n",
    ):
        Path("page.md").write_text(f"# A page\n\n{fault}")
        assert items(Path("page.md"))
        with pytest.raises(AssertionError, match=r"^page.md:4: "):
            Reader(sessions).follow(Path("page.md"))


# What a page names in passing.


def spans(page: Path) -> Iterator[str]:
    """Everything between single backticks outside fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield " ".join(match[1].split())


def mentions(page: Path) -> Iterator[str]:
    """Commands and words in passing: lines of blocks that are no program, and spans."""
    for language, _, body in fences(page):
        if language not in ("python", "bash", "ini", "dockerfile", "nginx"):
            yield from (line.removeprefix("$ ") for line in re.sub(r"\\\n\s*", "", body).splitlines())
    yield from spans(page)


def benchmark_flags(script: str) -> set[str]:
    """The flags of a benchmark, from its parser, after its `--help` ended well."""
    seen: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        plain = argparse.ArgumentParser.parse_args

        def parse(self, *given):
            seen.update(known_flags(self))
            return plain(self, *given)

        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [script, "--help"])
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert ended.value.code == 0
    return seen


def unknown_flags(page: Path, parsers: dict[str, Parser]) -> list[str]:
    """Flags that the page gives to a command that does not know them."""
    found = []
    subject = SUBJECT.get(name_of(page), name_of(page) if name_of(page) in parsers else None)
    about = [name for name in parsers if name and (subject is None or name.split()[0] == subject)]
    alone = set().union(*(known_flags(parsers[name]) for name in about))
    for mention in mentions(page):
        if mention.startswith(FOREIGN):
            continue
        command, _, comment = mention.strip().partition("#")  # a command that another one printed is indented
        known = alone
        given = fathom_words(command.split()) if COMMAND.match(command) else None
        if given:
            name = command_of(given)
            if name not in parsers:
                found.append(f"{page.name}: fathom {name}: no such command")
                continue
            known = known_flags(parsers[name])
            command = " ".join(given)
        elif command.startswith("python benchmarks/"):
            known = benchmark_flags(command.split()[1]) if FLAG.search(command) else set()
        elif command.startswith("torchrun"):
            continue
        found += [f"{page.name}: {mention}: {flag}" for flag in FLAG.findall(command) if flag not in known]
        found += [f"{page.name}: {mention}: {flag}" for flag in FLAG.findall(comment) if flag not in alone]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_are_known_to_their_commands(page: Path, parsers: dict[str, Parser]) -> None:
    assert unknown_flags(page, parsers) == []


def test_an_unknown_flag_is_caught(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    page = tmp_path / "generate.md"
    page.write_text(
        "`--seed`, `--sead`; `fathom lens --top`, `fathom lens --chat`, `fathom peek`\n"
        "```\nfathom train RECIPE --fast  # like --chat, not like --run\npython benchmarks/data.py --step 3\n```\n"
    )
    caught = {fault.rsplit(": ", 1)[1] for fault in unknown_flags(page, parsers)}
    assert caught == {"--sead", "--chat", "--fast", "--run", "--step", "no such command"}


def test_commands_in_passing(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for span in (span for page in PAGES for span in spans(page)):
        words = span.split()
        if COMMAND.match(span) and (given := fathom_words(words)) and "recipes/" in span:
            code = cli.main([*given, *([] if given[0] == "mechanisms" else ["--dry-run"])])
            assert code == 0 or capsys.readouterr().err.count("no such directory: `fathom prepare"), (
                span
            )  # a corpus not yet made
        elif span.startswith("make "):
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), span


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_recipe_keys_are_known(page: Path) -> None:
    keys = {key for key, *_ in describe()}
    for span in spans(page):
        name, _, value = span.partition("=")
        if not re.fullmatch(r"(model|data|optim|train|parallel|evaluate|track|kvcache|lora)\.[a-z_.]+(?<!\.py)", name):
            continue
        assert name in keys or name.startswith("model."), span
        if value:
            load_recipe(ROOT / "recipes" / "tiny.yaml", [span]).config()


def anchors(page: Path) -> set[str]:
    """What a link may name on a page: its headings, as GitHub and the site write them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def broken_links(page: Path) -> list[str]:
    """Links to a page, or to a heading on it, that is not there."""
    found = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if target.startswith("http") or there.suffix != ".md":
            continue
        if not there.is_file() or (anchor and anchor not in anchors(there)):
            found.append(target)
    return found


def absent_files(page: Path) -> list[str]:
    """Files of the tree that are named and are not there."""
    named = [span for span in spans(page) if re.fullmatch(r"(src|tests|docs|benchmarks|recipes)/[\w./-]+", span)]
    return [
        name
        for name in named
        if not (ROOT / name).exists() and not any(w in name for w in (*WRITTEN.values(), STANDS_FOR_ANY))
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_pointed_at_is_there(page: Path) -> None:
    assert broken_links(page) == [] and absent_files(page) == []


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")} - {"docs/index.md"}
    assert not {page for page in pages if f": {page}\n" not in listed}


def test_a_broken_link_is_caught(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "# The *top*\n\n[there](page.md#the-top), [not](#bottom), [gone](docs/gone.md), "
        "`tests/test_docs.py`, `src/gone.py`"
    )
    assert broken_links(tmp_path / "page.md") == ["#bottom", "docs/gone.md"]
    assert absent_files(tmp_path / "page.md") == ["src/gone.py"]


def test_extras_exist() -> None:
    offered = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"pip install [^\n`]*\[(\w+)\]'", text))
    assert named and all(re.search(rf"^{extra} = \[", offered, re.M) for extra in named)


# Troubleshooting.


@cache
def strings(file: Path) -> tuple[str, ...]:
    """Every string of a source file, with an ellipsis for each value in it."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    whole = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    made = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    return (*whole, *("".join(one.value if isinstance(one, ast.Constant) else "…" for one in parts) for parts in made))


def unknown_errors(page: Path) -> list[str]:
    """Headings of a page, in code, that no message of the package reads like."""
    sources = {file: file.read_text(encoding="utf-8") for file in (ROOT / "src/fathom").rglob("*.py")}
    found = []
    for error in re.findall(r"^### ``\s*(.*?)\s*``$", page.read_text(encoding="utf-8"), re.M):
        shape = re.compile(".*".join(map(re.escape, error.split("…"))), re.S)
        start = max(error.split("…"), key=len).strip()[:16]
        files = (file for file, text in sources.items() if start in text)
        if not any(shape.fullmatch(text) for file in files for text in strings(file)):
            found.append(error)
    return found


def test_errors_are_those_of_the_code(tmp_path: Path) -> None:
    """Each heading is a message, word for word; a message that nothing prints would be found."""
    assert unknown_errors(DOCS / "how-to" / "troubleshooting.md") == []
    (tmp_path / "page.md").write_text("### ``train.device=cuda: no CUDA device here; buy one``\n")
    assert len(unknown_errors(tmp_path / "page.md")) == 1


# A mechanism in two files.


def as_module(mechanism: str, source: str, page: Path) -> None:
    """What a file of that name among the recurrences would define is defined."""
    module = ModuleType(f"fathom.models.recurrences.{mechanism}")
    module.__package__ = "fathom.models.recurrences"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, str(page), "exec"), vars(module))


def typed(source: str, where: Path) -> str:
    """What mypy says of a program, by the package's own rules; `make lint` has left most of the work in its cache."""
    import mypy.api

    script = where / "script.py"
    script.write_text(source)
    said, complaint, _ = mypy.api.run(["--config-file", str(ROOT / "pyproject.toml"), str(script)])
    return said + complaint


@pytest.mark.slow
def test_what_the_readme_shows_is_well_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one run of mypy, which finds the planted faults and no other."""
    monkeypatch.chdir(ROOT)
    blocks = [item.text for item in items(ROOT / "README.md") if item.kind == "python"]
    assert any("fathom.prepare" in block for block in blocks) and any("from_pretrained" in block for block in blocks)
    planted = 'fathom.prepare(["books"], 3)\nfathom.trian()\n'
    said = typed("".join([*blocks, planted]), tmp_path)
    end = "".join(blocks).count("\n")
    faults = [(int(line), kind) for line, kind in re.findall(r"script\.py:(\d+): error: .*\[([a-z-]+)\]", said)]
    assert faults == [(end + 1, "arg-type"), (end + 2, "attr-defined")], said


@pytest.mark.slow
def test_the_example_policy_decodes_what_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches, with padding on the left, and each token as deep as it needs."""
    monkeypatch.setitem(MECHANISMS, "settle", runpy.run_path(str(ROOT / "examples" / "settle.py"))["SETTLE"])
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "initializer_range": 0.3}
    config = FathomConfig(**shape, recurrence="settle", recurrence_options={"tau": 0.5})
    model = FathomForCausalLM(config).double().eval()
    ids = torch.randint(3, 300, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False)
        assert len(whole.trips[1].unique()) > 1
        cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
        for t in range(5, 9):
            step = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)
            assert (step.logits[:, 0] - whole.logits[:, t]).abs().max() < 1e-11
        assert torch.equal(cache.layers[0].table.halt[1] + 1, whole.trips[1])
    assert model.train()(ids, labels=ids).metrics["trips"] > 1
