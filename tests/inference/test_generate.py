"""Text from an exported model: streamed as it is drawn, the same from the same seed, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fathom.cli import main
from fathom.data.tokenizer import train_bpe
from fathom.export import export
from fathom.inference.generate import GenerateError, Sampling, find_model, generate, load
from fathom.models import FathomConfig, FathomForCausalLM


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = train_bpe(["the depth of a river — measured in fathoms é"] * 20, 300)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig(**shape, mixer="depth_attention", initializer_range=0.5))
    return export(model, tmp_path_factory.mktemp("run") / "model", tokenizer)


def test_what_is_streamed_is_the_text(exported: Path):
    model, tokenizer = load(exported, "cpu")
    pieces: list[str] = []
    made = generate(model, tokenizer, "the depth", Sampling(12, seed=3), pieces.append)
    assert "".join(pieces) == made.text and len(pieces) > 3
    assert made.tokens == 12 and made.tokens_per_second > 0


def test_a_seed_decides(exported: Path):
    model, tokenizer = load(exported, "cpu")
    texts = [generate(model, tokenizer, "", Sampling(12, temperature=2.0, seed=seed)).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_is_the_likeliest_token_each_time(exported: Path):
    model, tokenizer = load(exported, "cpu")
    made = generate(model, tokenizer, "the", Sampling(6, temperature=0))
    ids = tokenizer("the", return_tensors="pt").input_ids
    for _ in range(6):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert made.text == tokenizer.decode(ids[0, made.prompt_tokens :], skip_special_tokens=True)


def test_the_context_ends_the_text(exported: Path):
    model, tokenizer = load(exported, "cpu")
    made = generate(model, tokenizer, "the", Sampling(1000, seed=0))
    assert made.prompt_tokens + made.tokens <= 32
    with pytest.raises(GenerateError, match="context is 32"):
        generate(model, tokenizer, "the depth of a river " * 20)


def test_a_run_and_a_comparison_lead_to_their_model(exported: Path, tmp_path: Path):
    assert find_model(exported.parent) == exported
    runs = [{"loss": 2.0, "directory": "elsewhere"}, {"loss": 1.0, "directory": "arms/b/seed-1"}]
    arms = [{"loss": 3.0, "runs": [{"loss": 3.0, "directory": "arms/a/seed-0"}]}, {"loss": 1.5, "runs": runs}]
    (tmp_path / "report.json").write_text(json.dumps({"arms": arms}))
    (tmp_path / "arms/b").mkdir(parents=True)
    (tmp_path / "arms/b/seed-1").symlink_to(exported.parent)
    assert find_model(tmp_path) == tmp_path / "arms/b/seed-1/model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere"], "no such directory"),
        (["."], "neither a model directory"),
        (["MODEL", "--top-p", "0"], "--top-p 0.0: allowed"),
        (["MODEL", "--temperature", "-1"], "--temperature -1.0: allowed"),
        (["MODEL", "--max-new-tokens", "0"], "--max-new-tokens 0: allowed"),
    ],
)
def test_errors_are_one_line(exported: Path, tmp_path: Path, monkeypatch, capsys, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *(str(exported) if word == "MODEL" else word for word in words)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_command(exported: Path, capsys):
    assert main(["generate", str(exported), "--prompt", "the", "--max-new-tokens", "5", "--seed", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("the") and "tokens/s" in printed.err
    assert main(["generate", str(exported), "--prompt", "the", "--max-new-tokens", "5", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 5
