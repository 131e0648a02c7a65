"""A newcomer's first hour: every command that a step prints is typed as it stands, without peft, from any directory."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fathom.cli.following import TEXT, after_train
from fathom.cli.main import main
from fathom.recipe import load_recipe
from fathom.training import TrainResult
from tests.tiny import tiny_tokenizer

FEW = ("train.steps=4", "train.tokens_per_step=64", "data.sequence_length=32", "train.device=cpu")
"""A run of a second, in place of an evening's."""


def llama(directory: Path, chat: bool = True) -> Path:
    """A small Llama with random weights, as transformers writes it."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(chat)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=len(tokenizer), max_position_embeddings=256, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def book(file: Path) -> Path:
    """One text file, of paragraphs."""
    parts = (f"{i} fathoms deep lies the lead, and the line is {i % 7} feet long." for i in range(200))
    file.write_text("\n\n".join(parts))
    return file


class Newcomer:
    """Somebody who types what the last command printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], text: Path) -> None:
        self.capsys, self.text = capsys, text
        self.printed = ""

    def types(self, *words: str) -> None:
        assert main(list(words)) == 0, self.capsys.readouterr().err
        self.printed = self.capsys.readouterr().out

    def types_printed(self, number: int, *more: str) -> list[str]:
        """The so-many-th of the commands that the last one printed, which only lack the text."""
        line = self.offered()[number]
        words = [str(self.text) if word == TEXT else word for word in shlex.split(line)]
        assert words[0] == "fathom"
        self.types(*words[1:], *more)
        return words[1:]

    def offered(self) -> list[str]:
        _, _, after = self.printed.partition("\nnext")
        return [line.strip() for line in after.splitlines()[1:] if line.startswith("  fathom ")]


@pytest.fixture
def newcomer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Newcomer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)  # the README does not install it
    return Newcomer(capsys, book(tmp_path / "my book.txt"))


@pytest.mark.parametrize("chat", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_from_a_model_to_a_conversation(
    chat: bool, newcomer: Newcomer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = llama(tmp_path / "a base", chat)
    newcomer.types("deepen", "a base", "--with", "depth_attention", "--out", "deeper")
    assert len(newcomer.offered()) == 2 and "(+0)" in newcomer.printed
    trains = newcomer.offered()[1]
    newcomer.types_printed(0)
    assert "\nheld out: 20 paragraphs of " in newcomer.printed
    assert newcomer.offered() == [trains], "prepare knows the model whose tokenizer it used"
    assert newcomer.types_printed(0, *FEW)[1:2] == ["deeper/heal.yaml"]
    assert newcomer.offered()[0].startswith(f"fathom evaluate '{base}' deeper-healed --perplexity deeper-data")
    says = newcomer.offered()[1]
    newcomer.types_printed(0)
    assert newcomer.offered() == [says]
    monkeypatch.setattr("fathom.cli.chat.typed_lines", lambda: iter(["How deep?\n"]))
    assert newcomer.types_printed(0, "--max-new-tokens", "4")[0] == ("chat" if chat else "generate")
    assert newcomer.printed


@pytest.mark.slow
def test_from_any_directory(newcomer: Newcomer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """heal.yaml's own comments too are typed as they stand."""
    llama(tmp_path / "base")
    newcomer.types("deepen", "base", "--with", "loop", "--steps", "4", "--out", "models/deeper")
    comments = (tmp_path / "models/deeper/heal.yaml").read_text().splitlines()
    newcomer.printed = "\nnext:\n" + "\n".join(line.replace("#   ", "  ") for line in comments)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    offered = newcomer.printed
    for number, more in ((0, ()), (1, FEW), (2, FEW), (3, ())):
        newcomer.printed = offered
        newcomer.types_printed(number, *more)
    assert "control" in newcomer.printed and (tmp_path / "models/deeper-report").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "teaches"), [("loop", True), ("ponder2", False)])
def test_from_a_gguf_file(mechanism: str, teaches: bool, newcomer: Newcomer, tmp_path: Path) -> None:
    """No recipe may name the file; the deepened model is its own teacher while its mechanism is closed."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # transformers reads GGUF files with it
    llama(tmp_path / "base")
    newcomer.types("export", "base", "--to", "base.gguf", "--as", "gguf")
    newcomer.types("deepen", "base.gguf", "--with", mechanism, "--steps", "4", "--out", "deeper")
    teacher = load_recipe(tmp_path / "deeper/heal.yaml").distill.teacher
    assert teacher == (str(tmp_path / "deeper") if teaches else None)
    for number, more in ((0, ()), (0, FEW), (0, ())):
        newcomer.types_printed(number, *more)


@pytest.mark.slow
def test_a_model_of_ones_own(newcomer: Newcomer) -> None:
    """Without a pretrained model, prepare names a small recipe of the corpus's vocabulary."""
    newcomer.types("prepare", str(newcomer.text), "--train-tokenizer", "300", "--held-out", "0.1", "--out", "data/mine")
    assert newcomer.types_printed(0, *FEW, "data.sequence_length=32")[1] == "tiny"
    assert newcomer.offered() == [
        "fathom evaluate runs/mine --perplexity data/mine",
        "fathom generate runs/mine 'It is'",
    ]
    newcomer.types_printed(1, "--max-new-tokens", "4")


def test_adapters_on_request(newcomer: Newcomer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The negative control: with --lora the recipe needs peft, which is said before any weight is read."""
    llama(tmp_path / "base")
    newcomer.types("deepen", "base", "--with", "depth_attention", "--lora", "--out", "deeper")
    newcomer.types_printed(0)
    recipe = load_recipe(tmp_path / "deeper/heal.yaml")
    assert (recipe.lora.rank, recipe.optim.lr) == (16, 2e-4)
    (tmp_path / "deeper/model.safetensors").write_bytes(b"")
    for more in ([], ["--dry-run"]):
        assert main(["train", "deeper/heal.yaml", "data.directory=deeper-data", *more]) == 2
        assert "LoRA needs peft: pip install" in capsys.readouterr().err


def test_nothing_follows_a_run_without_a_model(tmp_path: Path) -> None:
    recipe = load_recipe("tiny", ["train.export=false"])
    assert after_train(TrainResult(tmp_path, 1, True, 1, 1.0), recipe) == []
