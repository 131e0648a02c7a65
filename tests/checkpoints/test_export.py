"""Exports: three forms, one card, whole or not at all. The conformance suite holds that they open without Fathom."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, Qwen3ForCausalLM

from fathom.checkpoints.export import export, require_replaceable
from fathom.checkpoints.find import Facts
from fathom.cli.main import main
from fathom.errors import ModelError
from fathom.lineage.weights import open_weights
from fathom.models import FathomForCausalLM
from tests.models.cases import CASES, build, config_of, tokens
from tests.models.hosts.cases import ours_of, theirs_of
from tests.tiny import tiny_tokenizer


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_vanilla_as_a_stock_qwen3(tmp_path):
    model, ids = build(config_of("vanilla")), tokens(2, 9)
    stock = AutoModelForCausalLM.from_pretrained(export(model, tmp_path / "q", form="qwen3"))
    assert type(stock) is Qwen3ForCausalLM and torch.equal(logits(stock, ids), logits(model, ids))
    assert not list((tmp_path / "q").glob("*.py")), "a stock model needs no code"
    assert len({path.stat().st_mode for path in (tmp_path / "q").iterdir()}) == 1, "some files cannot be read by others"


@pytest.mark.parametrize("trips,case", [(None, "loop"), (None, "loop-middle"), (1, "loop"), (2, "loop-middle")])
def test_loop_as_a_deeper_qwen3(case, trips, tmp_path):
    """Unrolled as often as it is served: a configuration's `max_trips` is what every call makes."""
    model, ids = build(config_of(case, max_trips=trips)), tokens(2, 9)
    stock = AutoModelForCausalLM.from_pretrained(export(model, tmp_path / "q", form="unrolled"))
    plan = model.model.plan if trips is None else model.model.plan_of(trips)
    assert type(stock) is Qwen3ForCausalLM and len(stock.model.layers) == sum(map(len, plan))
    assert torch.equal(logits(stock, ids), logits(model, ids))
    if trips is None:
        assert len(stock.model.layers) > 4
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(stock.generate(ids, max_new_tokens=5, do_sample=False), wanted)


def test_an_embedding_scale_is_folded_in(tmp_path):
    model, ids = build(config_of("vanilla", embedding_scale=3.0)), tokens(1, 9)
    stock = AutoModelForCausalLM.from_pretrained(export(model, tmp_path / "q", form="qwen3"))
    assert torch.allclose(logits(stock, ids), logits(model, ids), atol=1e-5)


@pytest.mark.parametrize(
    "case,form,says",
    [
        ("depth_attention", "qwen3", "no other model family has mixer=depth_attention"),
        ("denseformer", "qwen3", "residual=denseformer"),
        ("loop", "qwen3", "recurrence=loop"),
        ("loop+depth_attention", "unrolled", "a model with mixer=depth_attention cannot be unrolled"),
        ("ponder+depth_attention", "unrolled", "recurrence=ponder cannot be unrolled, since only"),
        ("loop-early", "unrolled", "a loop with .* exit or kv cannot be unrolled"),
        ("vanilla", "onnx", "must be one of fathom, native, unrolled, gguf, llama"),
        ("vanilla", "gguf", "a GGUF export is a single file; choose a path that ends in .gguf"),
    ],
)
def test_forms_that_cannot_be(case, form, says, tmp_path):
    fields = {"recurrence_options": {"trips": 2, "exit": "joint"}} if case == "loop-early" else {}
    with pytest.raises(ModelError, match=says):
        export(build(config_of(case.removesuffix("-early"), **fields)), tmp_path / "q", form=form)
    assert not (tmp_path / "q").exists(), "nothing is left of a failed export"


def test_card_says_what_how_and_how_well(tmp_path):
    facts = Facts("model:\n  a: 1\n", 1200, 3_456_000, {"loss": 2.5, "domains": {}})
    card = (export(build(config_of("depth_attention")), tmp_path / "q", facts=facts) / "README.md").read_text()
    for text in ("depth_attention", "trust_remote_code=True", "1,200 steps, 3,456,000 tokens", "loss 2.5000", "  a: 1"):
        assert text in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_other_peoples_files_stay(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="not an earlier export"):
        export(build(config_of("vanilla")), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "README.md").write_text("# A model of another hand")
    with pytest.raises(ModelError, match="not an earlier export"):
        export(build(config_of("vanilla")), tmp_path)


def test_the_model_of_another_run_and_what_was_put_into_an_export_stay(tmp_path):
    mine, other = tmp_path / "mine" / "model", tmp_path / "other" / "model"
    for model in (mine, other):
        model.mkdir(parents=True)
        (model.parent / "recipe.yaml").touch()
        (model / "README.md").write_text("Exported by Fathom")
    with pytest.raises(ModelError, match="is the model of the run"):
        export(mine, other)
    (other.parent / "recipe.yaml").unlink()  # no run's, so an export like any other
    require_replaceable(other, mine)
    require_replaceable(mine)  # as the run itself writes it
    (other / "data").mkdir()
    with pytest.raises(ModelError, match="not an earlier export"):
        export(mine, other)
    (other / "data").rename(other / "__pycache__")
    require_replaceable(other, mine)


def test_an_earlier_export_is_replaced(tmp_path):
    for case in ("loop", "vanilla"):
        export(build(config_of(case)), tmp_path / "model")
        assert (
            json.loads((tmp_path / "model" / "config.json").read_text())["recurrence"]
            == ("loop", "once")[case == "vanilla"]
        )
    with pytest.raises(ModelError):  # a source that is no path, RUN@step-4, is looked up all the same
        export(f"{tmp_path / 'run'}@step-4", tmp_path / "model")


@pytest.mark.quick("attention_residuals", "ponder2", "latent_cot+depth_attention", "ponder@gpt2")
@pytest.mark.parametrize("case", CASES)
def test_command_exports_an_export_again(case, tmp_path, capsys):
    model, ids = build(config_of(case)), tokens(1, 9)
    export(model, tmp_path / "a")
    assert main(["export", str(tmp_path / "a"), "--to", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["form"] == "fathom"
    first, again = (FathomForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    weights = again.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    # Beside the first, not the model in memory: how a file aligns a small tensor can decide a last bit.
    assert torch.equal(logits(again, ids), logits(first, ids))
    assert (logits(again, ids) - logits(model, ids)).abs().max() < 1e-4


def test_a_comparison_gives_its_best_run(tmp_path, capsys):
    """To `export` and to the reader of weights alike; a report that is none of a comparison is one line."""
    best = tmp_path / "arms" / "b" / "seed-1"
    model = build(config_of("loop"))
    export(model, best / "model")
    (best / "recipe.yaml").write_text("model: {}\n")
    (best / "result.json").write_text('{"step": 7}')
    runs = [{"loss": 2.0, "directory": "arms/b/seed-0"}, {"loss": 1.0, "directory": "arms/b/seed-1"}]
    (tmp_path / "report.json").write_text(json.dumps({"arms": [{"name": "b", "loss": 1.5, "runs": runs}]}))
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "out")]) == 0
    again = FathomForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    assert "7 steps" in (tmp_path / "out" / "README.md").read_text()
    expected = open_weights(best / "model").tensor("q", 0)
    for where in (tmp_path, best):
        opened = open_weights(where)
        assert opened.name == str(where) and (opened.tensor("q", 0) == expected).all()
    (tmp_path / "report.json").write_text("{}")
    capsys.readouterr()
    for words in (["export", tmp_path, "--to", tmp_path / "x"], ["lineage", "compare", tmp_path, best]):
        assert main([*map(str, words)]) == 2
        assert "not a comparison's" in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_command_complains_in_one_line(tmp_path, capsys):
    for place, says in ((tmp_path, "neither a run"), (tmp_path / "no", "no such directory")):
        assert main(["export", str(place), "--to", str(tmp_path / "b")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and says in error


class Only(LogitsProcessor):
    """Every draw gives one token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, ids, scores):
        return torch.full_like(scores, -1e9).index_fill_(1, torch.tensor([self.token]), 0.0)


def with_tokenizer(case="vanilla", **fields):
    """A model with an embedding row for each token of a tokenizer that has EOS 0, PAD 1 and ends a turn with 2."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<|im_start|>"
    unset = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    fields = {**unset, "vocab_size": len(tokenizer), "max_position_embeddings": 96, **fields}
    return build(config_of(case, **fields)), tokenizer


@pytest.mark.parametrize("case,form", [("depth_attention", "fathom"), ("vanilla", "qwen3"), ("loop", "unrolled")])
def test_an_export_stops(case, form, tmp_path):
    model, tokenizer = with_tokenizer(case)
    directory = export(model, tmp_path / "q", tokenizer, form)
    config, generation, names = (
        json.loads((directory / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    )
    for saved in (config, generation):
        assert (saved["eos_token_id"], saved["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert config["max_position_embeddings"] == names["model_max_length"] == 96
    assert AutoTokenizer.from_pretrained(directory).model_max_length == 96
    again = (FathomForCausalLM if form == "fathom" else AutoModelForCausalLM).from_pretrained(directory)
    for token, length in ((tokenizer.eos_token_id, 1), (50, 6)):
        out = again.generate(torch.tensor([[60]]), max_new_tokens=6, logits_processor=[Only(token)])
        assert out.shape[1] == 1 + length
    assert (model.config.eos_token_id, model.config.pad_token_id) == (None, None), (
        "the model that was given is as it was"
    )


def test_an_export_without_a_tokenizer_is_as_the_model_says(tmp_path):
    model = build(config_of("vanilla", eos_token_id=7, pad_token_id=9))
    config = json.loads((export(model, tmp_path / "q") / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (7, 9)


@pytest.mark.parametrize(
    "own,config_says,generation_says",
    [
        ({"eos_token_id": 2}, 2, [2, 0]),  # a turn's end, and the end of text
        ({"eos_token_id": [2, 0]}, [2, 0], [2, 0]),
        ({"eos_token_id": [2, 70]}, 2, [2, 0]),  # 70 is a word
        (
            {"eos_token_id": 151645, "pad_token_id": 151643, "bos_token_id": 151643},
            0,
            0,
        ),  # Qwen3's, of another tokenizer
        ({"eos_token_id": 70}, 0, 0),
    ],
)
def test_the_models_own_ends_stand_where_the_tokenizer_knows_them(own, config_says, generation_says, tmp_path):
    model, tokenizer = with_tokenizer()
    for key, value in own.items():
        setattr(model.config, key, value)
        setattr(model.generation_config, key, value)
    directory = export(model, tmp_path / "q", tokenizer)
    config, generation = (
        json.loads((directory / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    assert config["eos_token_id"] == config_says and generation["eos_token_id"] == generation_says
    assert config["pad_token_id"] == generation["pad_token_id"] == 1
    assert config["bos_token_id"] is None and generation.get("bos_token_id") is None


def test_a_stop_never_becomes_the_padding_of_an_embedding(tmp_path):
    """A padding row gets no gradient: EOS in its place would never be learned by whoever continues the export."""
    model, tokenizer = with_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    directory = export(model, tmp_path / "q", tokenizer)
    assert json.loads((directory / "config.json").read_text())["pad_token_id"] is None
    assert json.loads((directory / "generation_config.json").read_text())["pad_token_id"] == tokenizer.eos_token_id
    again = FathomForCausalLM.from_pretrained(directory)
    again(torch.tensor([[0, 5, 0, 7]]), labels=torch.tensor([[0, 5, 0, 7]])).loss.backward()
    assert again.model.embed_tokens.weight.grad[0].abs().sum() > 0


OPENED_AGAIN = """
import torch
torch.set_num_threads(1)

def check(model):
    for p in model.parameters():  # a file's bytes lie where they lie; narrow products round by where that is
        p.data = p.data.clone()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)

ids, logits = torch.load("expected.pt", weights_only=True)
check(model)
model.save_pretrained("again")
check(AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True))

ids, logits = torch.load("hosted.pt", weights_only=True)
check(AutoModelForCausalLM.from_pretrained("hosted", trust_remote_code=True, attn_implementation="sdpa").eval())
"""


@pytest.mark.slow
@pytest.mark.parametrize("case,form", [("latent_cot+hyper_connections", "fathom"), ("loop", "unrolled")])
def test_the_cards_snippet_asks_nothing(case, form, tmp_path):
    """As a reader copies it, in a process without Fathom whose standard input is closed; our form travels on.

    There a family that runs its own layers opens too: its code imports them from transformers.
    """
    model, tokenizer = with_tokenizer(case)
    directory = export(model, tmp_path / "q", tokenizer, form)
    snippet = re.search(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.S)[1]
    code = "import sys; sys.modules['fathom'] = None\n" + snippet.replace("path/to/this", str(directory))
    code += (
        "print(tokenizer.decode(model.generate(**tokenizer('The lead', return_tensors='pt'), max_new_tokens=3)[0]))\n"
    )
    ids = tokens(2, 9)
    with torch.no_grad():
        torch.save((ids, model(ids).logits), tmp_path / "expected.pt")
    if form == "fathom":
        code += OPENED_AGAIN
        mechanisms = {"recurrence": "loop", "recurrence_options": {"trips": 2}, "residual": "hyper_connections"}
        hosted = ours_of(theirs_of("qwen3_moe"), **mechanisms)
        export(hosted, tmp_path / "hosted")
        torch.save((ids, logits(hosted, ids)), tmp_path / "hosted.pt")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The lead") and "custom code" not in done.stdout + done.stderr, done.stdout
    assert "of type" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("model.safetensors", lambda data: data[:-100], "model.safetensors"),
        ("config.json", lambda data: b"{", "config.json"),
        ("config.json", lambda data: data.replace(b'"depth_attention"', b'"nope"'), "mixer must be one of"),
    ],
    ids=["truncated", "not JSON", "unknown mixer"],
)
def test_what_cannot_be_opened_is_one_line(tmp_path, capsys, file, harm, words):
    export(build(config_of("depth_attention")), tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_bytes(harm(path.read_bytes()))
    capsys.readouterr()  # what was shown while it was written
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("fathom: ") and printed.count("\n") == 1 and words in printed
    assert not (tmp_path / "out").exists()
