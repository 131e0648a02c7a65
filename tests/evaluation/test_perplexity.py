"""Perplexity against its definition, token by token; and what may and may not be concluded from two of them."""

from __future__ import annotations

import hashlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, normalizers
from transformers import Gemma3Config, GPT2Config, GPT2LMHeadModel

from fathom.checkpoints.export import export
from fathom.checkpoints.open import longest_context
from fathom.cli.main import main
from fathom.data.shards import TokenDataset
from fathom.data.sources import Reading
from fathom.data.tokenizer import train_bpe
from fathom.errors import DataError, SettingsError
from fathom.evaluation.harness import TaskResult, fitted, items_of
from fathom.evaluation.paired import Items, difference, group_difference, rows
from fathom.evaluation.perplexity import Cut, Domain, DomainScore, Passage, read_domains, score
from fathom.evaluation.results import CheckpointScores, ScoresReport
from fathom.evaluation.scores_page import interval_notes, verdict
from fathom.evaluation.scoring import Checkpoint, evaluate
from fathom.evaluation.tasks import file_rows
from fathom.models import FathomConfig, FathomForCausalLM

TEXTS = ["a river is measured in fathoms", "the depth — ø — of the sea, " * 4, "x", "lead and rope " * 9]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS * 5, 290)


def tiny(tokenizer, seed: int = 0, **axes: object) -> FathomForCausalLM:
    torch.manual_seed(seed)
    return FathomForCausalLM(FathomConfig(vocab_size=len(tokenizer), **SHAPE, **axes)).eval()


def domain(*texts: str) -> Domain:
    return Domain("texts", [Passage(text, None, len(text.encode())) for text in texts])


@torch.no_grad()
def token_by_token(model, ids: list[int], context: int, stride: int) -> list[float]:
    """The definition: token j is predicted in the first window k S … k S + C that reaches it, alone."""
    losses = []
    for j in range(1, len(ids)):
        k = next(k for k in range(len(ids)) if j <= k * stride + context)
        logits = model(input_ids=torch.tensor([ids[k * stride : j]]), use_cache=False).logits[0, -1]
        losses.append(-logits.double().log_softmax(0)[ids[j]].item())
    return losses


@pytest.mark.parametrize(("context", "stride"), [(64, 64), (16, 5), (7, 1), (1, 1)])
def test_windows_equal_the_definition(tokenizer, context: int, stride: int) -> None:
    model = tiny(tokenizer, mixer="depth_attention").double()
    found = score(model, tokenizer, domain(*TEXTS), Cut(context, stride))
    for i, text in enumerate(TEXTS):
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
        expected = token_by_token(model, ids, context, stride)
        assert found.tokens[i] == len(expected) and found.bytes[i] == len(text.encode())
        assert found.nats[i] == pytest.approx(sum(expected), rel=1e-6)
    assert sum(found.position_tokens) == sum(found.tokens)
    assert sum(found.position_nats) == pytest.approx(sum(found.nats))
    assert found.perplexity == pytest.approx(math.exp(sum(found.nats) / sum(found.tokens)))


def test_every_token_is_scored_once() -> None:
    for length in range(40):
        for context in (1, 4, 9):
            for stride in range(1, context + 1):
                found = list(Cut(context, stride).windows(length))
                assert [j for w in found for j in range(w.scored, w.stop)] == list(range(length))
                assert all(w.stop - w.start <= context and w.start <= w.scored for w in found)
                # After the first window, more than context - stride tokens are seen.
                assert all(w.scored + 1 - w.start > context - stride for w in found[1:])


def test_batches_change_nothing(tokenizer) -> None:
    model = tiny(tokenizer).double()
    alone = score(model, tokenizer, domain(*TEXTS), Cut(12, 4), batch_size=1)
    together = score(model, tokenizer, domain(*TEXTS), Cut(12, 4), batch_size=100)
    assert together.nats == pytest.approx(alone.nats, rel=1e-6)
    assert together.position_tokens == alone.position_tokens


class Uniform:
    """Every token is as likely as any other."""

    device = torch.device("cpu")
    rows_that_fit = 10**9

    def __init__(self, vocab_size: int) -> None:
        text = SimpleNamespace(vocab_size=vocab_size)
        self.config = SimpleNamespace(max_position_embeddings=32, get_text_config=lambda decoder: text)
        self.vocab_size = vocab_size
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: int, **_: object) -> SimpleNamespace:
        if len(input_ids) > self.rows_that_fit:
            raise torch.OutOfMemoryError("too much")
        self.seen.append(len(input_ids))
        return SimpleNamespace(logits=torch.zeros(len(input_ids), logits_to_keep, self.vocab_size))


class Chunks:
    """So many bytes are a token."""

    bos_token_id, eos_token_id = None, 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        data = text.encode()
        return {"input_ids": [int.from_bytes(data[i : i + self.size], "big") for i in range(0, len(data), self.size)]}


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    found = [score(Uniform(256**n), Chunks(n), domain("eéight bits", "per byte"), Cut(8)) for n in (1, 2)]
    assert [f.bits_per_byte for f in found] == pytest.approx([8.0, 8.0])
    assert found[0].perplexity == pytest.approx(256) and found[1].perplexity == pytest.approx(65536)


def test_out_of_memory_halves_the_batch(capsys) -> None:
    model = Uniform(256)
    model.rows_that_fit = 3
    found = score(model, Chunks(1), domain(*["a" * 100] * 5), Cut(10), batch_size=20)
    assert found.bits_per_byte == pytest.approx(8) and max(model.seen) <= 3
    assert "out of memory" in capsys.readouterr().err
    model.rows_that_fit = 0
    with pytest.raises(torch.OutOfMemoryError):
        score(model, Chunks(1), domain("a"), Cut(10))


def test_shards_and_their_text_score_alike(corpus: Path, tokenizer) -> None:
    """With the shards' tokenizer their ids are taken as they are; another one reads the text that they decode to."""
    from fathom.data.tokenizer import load_tokenizer

    data = TokenDataset.open(corpus, "val")
    theirs = load_tokenizer(str(data.tokenizer_directory))
    shards = read_domains([str(corpus)], limit=3)
    assert [d.name for d in shards] == ["rivers", "seas"] and len(shards[0].documents) == 3
    for domain_ in shards:
        texts = [theirs.decode(document.ids.tolist()) for document in domain_.documents]
        assert [len(text.encode()) for text in texts] == [document.bytes for document in domain_.documents]
        for other in (theirs, tokenizer):
            model = tiny(other)
            found = score(model, other, domain_, Cut(32))
            assert found == score(model, other, domain(*texts), Cut(32))
        torn = replace(domain_, documents=[domain_.documents[0]._replace(bytes=7)])
        with pytest.raises(SettingsError, match="evaluate on the original text"):
            score(tiny(tokenizer), tokenizer, torn, Cut(32))


@pytest.mark.parametrize(
    ("normalizer", "kept"),
    [
        (None, True),
        (normalizers.NFC(), True),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), True),
        (normalizers.Lowercase(), False),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), False),
        (normalizers.Replace("D", "d"), False),
        (normalizers.NFKC(), False),
    ],
)
def test_shards_of_changed_text_are_refused(normalizer, kept: bool, tokenizer, tmp_path: Path) -> None:
    """In lower case they decode to as many bytes, of another text."""
    theirs = Tokenizer.from_str(train_bpe(TEXTS, 280).backend_tokenizer.to_str())
    if normalizer is not None:
        theirs.normalizer = normalizer
    theirs.save(str(tmp_path / "tokenizer.json"))
    ids = np.array(theirs.encode("DEEP").ids)
    size = len(theirs.decode(ids.tolist()).encode())
    shards = Domain("shards", [Passage(None, ids, size)], tmp_path / "tokenizer.json")
    if kept:
        assert score(tiny(tokenizer), tokenizer, shards, Cut(32)).bytes == [size]
        return
    with pytest.raises(SettingsError, match=r"do not decode to their original text.* original text instead"):
        score(tiny(tokenizer), tokenizer, shards, Cut(32))


def test_domains_have_names(tmp_path: Path) -> None:
    (tmp_path / "sea.txt").write_text("deep")
    lines = [{"text": "one", "kind": "k1"}, {"text": "", "kind": "k1"}, {"text": "two", "kind": "k2"}]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_domains([str(tmp_path / "sea.txt"), f"mine={tmp_path / 'val.jsonl'}"])
    assert {d.name: [document.text for document in d.documents] for d in found} == {
        "sea": ["deep"],
        "mine": ["one", "two"],
    }
    by_field = read_domains([str(tmp_path / "val.jsonl")], Reading(domain_field="kind"))
    assert [d.name for d in by_field] == ["k1", "k2"]
    assert len(read_domains([str(tmp_path / "val.jsonl")], limit=1)[0].documents) == 1


def test_text_that_is_not_utf8_is_refused_without_a_flag(tmp_path: Path) -> None:
    """The flags that go on are those of `fathom prepare`."""
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 \(unexpected end of data\)$"):
        read_domains([str(tmp_path / "a.txt")])
    with pytest.raises(DataError, match=r"a\.txt is over 2 bytes$"):
        read_domains([str(tmp_path / "a.txt")], Reading(max_record_bytes=2))


def test_each_input_is_a_domain(tmp_path: Path) -> None:
    """Two files of one name are not one text, of which a limit would leave the second out."""
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "wiki.txt").write_text(f"{folder} words")
    old, new = (str(tmp_path / folder / "wiki.txt") for folder in ("old", "new"))
    for inputs in ([old, new], [old, f"wiki={new}"], [old, old]):
        with pytest.raises(SettingsError, match=r"two inputs have a domain 'wiki'; name one of them: NAME=INPUT"):
            read_domains(inputs)
    assert [d.name for d in read_domains([old, f"new={new}"])] == ["wiki", "new"]
    assert len(read_domains([f"wiki={old}", f"wiki={new}"])[0].documents) == 2


def test_the_interval_has_teeth() -> None:
    """A planted difference is found, a model does not differ from itself, and 95 % means 95 %."""
    chance = np.random.default_rng(0)
    sizes = chance.integers(20, 2000, 60)
    bits = sizes * chance.normal(1.0, 0.2, 60)
    control = Items(bits.tolist(), sizes.tolist())
    worse = Items((bits + sizes * chance.normal(0.03, 0.02, 60)).tolist(), sizes.tolist())
    found = difference(worse, control)
    assert found.excludes_zero and found.low < 0.03 < found.high
    itself = difference(control, control)
    assert itself.mean == 0 and not itself.excludes_zero and itself.p == 1
    covered = 0
    for _ in range(400):
        noise = sizes * chance.normal(0.03, 0.1, 60)
        found = difference(Items((bits + noise).tolist(), sizes.tolist()), control)
        covered += found.low < 0.03 < found.high
    assert 0.91 < covered / 400 < 0.985


def test_rows_pair_only_what_is_the_same(tokenizer) -> None:
    found = score(tiny(tokenizer), tokenizer, domain(*TEXTS), Cut(16))
    other = score(Uniform(256), Chunks(1), domain(*TEXTS), Cut(16))
    table = rows({name: {("t", m): [i] for m, i in s.items().items()} for name, s in (("a", found), ("b", other))})
    by_metric = {row.metric: row for row in table}
    assert by_metric["perplexity"].differences == {}, "other tokens: per-token losses do not compare"
    gap = by_metric["bits_per_byte"].differences["b"]
    assert gap.value == pytest.approx(other.bits_per_byte - found.bits_per_byte)
    assert gap.p_holm == gap.p


def test_a_group_averages_its_tasks() -> None:
    chance = np.random.default_rng(1)
    parts = [(Items(chance.normal(g, 1, n).tolist()), Items([0.0] * n)) for g, n in ((0, 30), (1, 300))]
    found = group_difference(parts)
    assert found.mean == pytest.approx(np.mean([items.score for items, _ in parts]))
    small = difference(*parts[0])
    assert small.half_width / 2 < found.half_width < small.half_width
    sides = {name: {("g", "acc"): [pair[i] for pair in parts]} for i, name in ((1, "control"), (0, "new"))}
    (row,) = rows(sides)
    assert row.scores["new"] == pytest.approx(found.mean) == pytest.approx(row.differences["new"].value)
    joined = DomainScore.joined(
        [DomainScore([1.0], [2], [3], [1.0], [2]), DomainScore([4.0], [5], [6], [1, 3], [2, 3])]
    )
    assert (joined.nats, joined.position_nats, joined.position_tokens) == ([1.0, 4.0], [2.0, 3.0], [4, 3])


def test_items_of_one_cluster_are_one_draw() -> None:
    """200 items of 20 clusters that agree within: without their clusters the interval is three times too narrow."""
    chance = np.random.default_rng(3)
    shared = np.repeat(chance.normal(size=20), 10)
    clusters = [f"page {number // 10}" for number in range(200)]
    control = Items([0.0] * 200)
    alone, together = (
        difference(Items(shared.tolist()), control),
        difference(Items(shared.tolist(), clusters=clusters), control),
    )
    assert together.pairs == 20 and alone.pairs == 200 and together.half_width > 2.5 * alone.half_width
    assert together.half_width == pytest.approx(difference(Items(shared[::10].tolist()), Items([0.0] * 20)).half_width)
    for none in (None, ""):  # as JSON, and as an empty cell of a table
        assert difference(Items(shared.tolist(), clusters=[none] * 200), control) == alone
    called = []
    for _ in range(200):  # no difference: with the clusters one in twenty may be called one
        noise = (chance.normal(size=(20, 10)) + 3 * chance.normal(size=(20, 1))).ravel().tolist()
        called.append([difference(Items(noise, clusters=of), control).excludes_zero for of in (clusters, None)])
    together_called, alone_called = map(sum, zip(*called, strict=True))
    assert together_called <= 20 < 60 < alone_called


def test_differences_that_are_equal_up_to_rounding_have_no_interval() -> None:
    """0.3 − 0.2 thirty times: a mean of equal numbers is off by a rounding error, which is not noise of documents."""
    for value in (0.3, 0.2 + 1 / 3, 0.9):
        found = difference(Items([value] * 30), Items([0.2] * 30))
        assert found.mean == pytest.approx(value - 0.2) and found.half_width is None and found.p is None
    words = [float(length) for length in range(50, 80)]  # the same gap for every word
    apart = Items([3.1 * n for n in words], words), Items([3.0 * n for n in words], words)
    assert difference(*apart).half_width is None
    moved = Items([0.3] * 29 + [0.3 + 1e-9], None)
    assert difference(moved, Items([0.2] * 30)).half_width is not None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0] * 29, "Without an interval: the same difference in every document"),
        ([1.0] * 28 + [math.inf], "Without an interval: the same difference in every document"),
        ([1.0] * 9, "Without an interval: fewer than 20 documents"),
    ],
)
def test_a_note_names_why_there_is_no_interval(values: list[float], said: str) -> None:
    """Twenty documents and more are not called too few."""
    made = rows({"one": {("t", "acc"): [Items([0.0] * len(values))]}, "two": {("t", "acc"): [Items(values)]}})
    (note,) = interval_notes(made)
    assert note.startswith(said)
    few = len(values) < 20
    entries = dict.fromkeys(("one", "two"), CheckpointScores("", None, None, {}, {}, [], {}))
    assert ("too few" in verdict(ScoresReport("", entries, None, None, made))) is few


@pytest.mark.parametrize(
    ("documents", "longest", "interval", "skewed"),
    [(19, 10, False, False), (20, 10, True, False), (60, 30, True, False), (60, 1000, True, True)],
)
def test_how_many_documents_an_interval_needs(documents: int, longest: int, interval: bool, skewed: bool) -> None:
    """As many as everywhere; if one document outweighs all others, that is said."""
    chance = np.random.default_rng(5)
    lengths = [float(longest), *[10.0] * (documents - 1)]
    items = [Items(chance.normal(size=documents).tolist(), lengths) for _ in range(2)]
    sides = {name: {("text", "x"): [one]} for name, one in zip(("control", "new"), items, strict=True)}
    gap = rows(sides)[0].differences["new"]
    assert (gap.low is not None, gap.p is not None, gap.skewed) == (interval, interval, skewed)


def test_a_skewed_difference_is_named() -> None:
    chance = np.random.default_rng(6)
    for draws, skewed in ((chance.normal(size=40), False), (chance.lognormal(0, 2, 40), True)):
        sides = {"control": {("text", "x"): [Items([0.0] * 40)]}, "new": {("text", "x"): [Items(draws.tolist())]}}
        report = ScoresReport("", {}, None, None, rows(sides))
        assert report.gaps()[0].skewed is skewed
        assert any("text (x)" in note for note in interval_notes(report.rows)) is skewed


def test_a_question_of_a_file_keeps_its_cluster(tmp_path: Path) -> None:
    """lm-eval hands a document back with its answer: without the field, questions on one passage were independent."""
    lines = [{"text": "A lead sinks in the", "answer": "sea", "cluster": 7}, {"text": "So does a", "answer": "coin"}]
    path = tmp_path / "gaps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row["cluster"] for row in file_rows("cloze", path)] == ["7", None]
    path.write_text("".join(json.dumps({**line, "cluster": None}) + "\n" for line in lines))
    assert [set(row) for row in file_rows("cloze", path)] == [{"text", "answer"}] * 2


def test_a_record_names_its_cluster(tmp_path: Path) -> None:
    texts = [{"text": "one", "cluster": "a"}, {"text": "two", "cluster": 7}, {"text": "three"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (domain,) = read_domains([str(tmp_path / "x.jsonl")])
    assert [passage.cluster for passage in domain.documents] == ["a", "7", None]


@pytest.mark.parametrize(("reported", "parts"), [(0.25, [[1, 0, 0, 0]]), (0.5, [[1], [0, 0, 0]]), (0.3, None)])
def test_a_group_is_pooled_or_averaged_as_lm_eval_has_it(reported: float, parts: list[list[float]] | None) -> None:
    groups = {"groups": {"g": {"acc,none": reported}}, "group_subtasks": {"g": ["a", "b"]}}
    found = items_of([TaskResult(groups, {"a/acc": Items([1.0]), "b/acc": Items([0.0] * 3)})])
    assert found == ({} if parts is None else {("g", "acc"): [Items(part) for part in parts]})


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    export(tiny(tokenizer), folder / "vanilla", tokenizer)
    export(tiny(tokenizer, seed=1, mixer="depth_attention"), folder / "deep", tokenizer)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 5))
    return folder


def test_the_command(exported: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    words = ["evaluate", str(exported / "vanilla"), f"b={exported / 'deep'}", "--perplexity"]
    words += [f"x={exported / 'text.jsonl'}", f"y={exported / 'text.jsonl'}", "--context", "16", "--stride", "8"]
    words += ["--out", str(tmp_path), "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    mine = report["checkpoints"]["vanilla"]["perplexity"]
    assert mine.keys() == {"x", "y", "all text"} and mine["all text"]["bytes"] == 2 * mine["x"]["bytes"]
    assert len(report["rows"]) == 6 and all(row["differences"]["b"]["pairs"] for row in report["rows"])
    # Again: nothing is computed, nothing is opened.
    monkeypatch.setattr("fathom.checkpoints.open.open_checkpoint", pytest.fail)
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err.count("done before") == 4 and "b against vanilla" in printed.out


def test_out_gets_a_page_that_explains_intervals(exported: Path, tmp_path: Path, capsys) -> None:
    text = ["--perplexity", str(exported / "text.jsonl"), "--context", "16", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["evaluate", str(exported / "vanilla"), *text]) == 0
    alone, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert f"report: {tmp_path / 'report.html'}" in alone and "vanilla has a perplexity of" in page
    assert "Intervals" not in alone and "Intervals" not in page
    pair = ["evaluate", str(exported / "vanilla"), str(exported / "deep"), *text]
    assert main(pair) == 0
    both, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert "Intervals: 95 %" in both and "Intervals: 95\u00a0%" in page and "deep against vanilla" in page
    assert main([*pair, "--limit", "1"]) == 0, "a difference of one document has no interval"
    assert "Intervals" not in capsys.readouterr().out
    assert "deep minus vanilla: " in page and "tested differences from vanilla are significant" in page
    assert "fewer than 20 documents, too few for an interval" in (tmp_path / "report.html").read_text()
    unpaired = ScoresReport(
        "", {name: CheckpointScores(name, None, None, {}, {}, [], {}) for name in "ab"}, None, None, []
    )
    assert verdict(unpaired) == "No difference from a could be paired, so there is no interval and no test."


def test_no_table_is_wider_than_the_terminal(exported: Path, capsys, monkeypatch) -> None:
    width = 40
    monkeypatch.setenv("COLUMNS", str(width))
    models = [f"{name}-{'of-a-long-name' * 3}={exported / name}" for name in ("vanilla", "deep")]
    assert main(["evaluate", *models, "--perplexity", str(exported / "text.jsonl"), "--context", "16"]) == 0
    table = capsys.readouterr().out.partition("\nIntervals")[0]
    assert "loss" in table and max(map(len, table.splitlines())) <= width
    markdown = "|Tasks|Version|Metric|\n|---|---|---|\n|" + "|".join(["long words " * 5] * 3) + "|"
    console = Console(width=width, file=io.StringIO())
    console.print(*fitted(markdown, width))
    assert max(map(len, console.file.getvalue().splitlines())) <= width


def test_the_default_context_is_the_models_own_under_any_name(exported: Path, tokenizer, tmp_path: Path) -> None:
    """GPT-2 says n_positions, and a model of text and images has the text's settings in a configuration within."""
    small = GPT2Config(vocab_size=len(tokenizer), n_positions=24, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(small).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    report = evaluate([tmp_path / "gpt2", exported / "vanilla"], perplexity=[str(exported / "text.jsonl")])
    assert report.context == 24
    assert longest_context(Gemma3Config(text_config={"max_position_embeddings": 40})) == 40


def test_other_conditions_are_computed_anew(exported: Path, tmp_path: Path, capsys) -> None:
    words = ["evaluate", str(exported / "vanilla"), "--perplexity", str(exported / "text.jsonl"), "--device", "cpu"]
    assert main([*words, "--context", "16", "--out", str(tmp_path)]) == 0
    for changed in (["--context", "8"], ["--context", "8", "--stride", "4"]):
        capsys.readouterr()
        assert main([*words, *changed, "--out", str(tmp_path)]) == 0
        assert "other conditions" in capsys.readouterr().err


def test_a_fingerprint_knows_templates_special_tokens_and_generation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint("sea", tmp_path, lambda _: (None, None))
    stamp = ("config.json", 2, (tmp_path / "config.json").stat().st_mtime_ns)
    before = checkpoint.fingerprint()
    assert before == hashlib.sha256(json.dumps([stamp]).encode()).hexdigest()  # as results kept earlier have it
    (tmp_path / "additional_chat_templates").mkdir()
    seen = {before}
    templates = ("chat_template.jinja", "additional_chat_templates/tool.jinja")
    for name in (*templates, "special_tokens_map.json", "generation_config.json"):
        for text in ("a", "another"):
            (tmp_path / name).write_text(text)
            assert checkpoint.fingerprint() not in seen
            seen.add(checkpoint.fingerprint())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["VANILLA"], "nothing to do"),
        (["VANILLA", "--perplexity", "nowhere.txt"], "no such file"),
        (["VANILLA", "--perplexity", "TEXT", "--context", "65"], "--context 65: allowed: at most 64"),
        (["VANILLA", "--perplexity", "TEXT", "--stride", "65"], "--stride 65: allowed: 1 to 64"),
        (["VANILLA", "VANILLA", "--perplexity", "TEXT"], "two checkpoints are called 'vanilla'"),
        (["..=VANILLA", "--perplexity", "TEXT"], "a checkpoint cannot be called '..'"),
        ([".=VANILLA", "--perplexity", "TEXT"], "a checkpoint cannot be called '.'"),
        (["/nowhere", "--perplexity", "TEXT"], "no such directory"),
    ],
)
def test_errors_are_one_line(exported: Path, capsys, words: list[str], message: str) -> None:
    places = {"VANILLA": str(exported / "vanilla"), "TEXT": str(exported / "text.jsonl")}
    words = [f"{name}{equals}{places.get(word, word)}" for name, equals, word in (w.rpartition("=") for w in words)]
    code = main(["evaluate", *words, "--device", "cpu"])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fathom: ")]
    assert code == 2 and len(said) == 1 and message in said[0]
