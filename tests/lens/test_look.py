"""The lens shows what the model computed, and its page shows what the lens found."""

import base64
import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fathom.cli.main import main
from fathom.errors import SettingsError
from fathom.lens import look as lens
from fathom.lens.look import look
from fathom.lens.page import lens_page, pack, quantise
from fathom.models import FathomForCausalLM, registry
from fathom.models.axes.roles import Mechanism, ValueMixer
from fathom.models.registry import parse_mechanism
from tests.lens.browser import Browser
from tests.models.hosts.cases import ours_of, theirs_of
from tests.tiny import export_tiny, tiny_config, tiny_tokenizer

TEXT = 'To fathom a thing is to measure its depth; wer Tiefen lotet, 深さを測る. </script><!-- & "quotes"'
SHORT = TEXT[:32]
MECHANISMS = {
    "vanilla": ("vanilla", {}),
    "depth_attention": ("depth_attention", {"mixer_options": {"stride": 2}}),
    "dense, biased": ("depth_attention", {"mixer_options": {"stride": 1, "self_bias": 0.5}}),
    "blended": ("depth_attention", {"mixer_options": {"stride": 1, "blend": 0.25}}),
    "window": ("depth_attention", {"mixer_options": {"stride": 4, "recent_layers": 1}}),
    "uniform_depth": ("uniform_depth", {}),
    "value_residual": ("value_residual", {}),
    "denseformer": ("denseformer+depth_attention", {"residual_options": {"dilation": 2}}),
    "attention_residuals": ("attention_residuals", {}),
    "hyper_connections": ("hyper_connections", {}),
    "loop": ("loop", {"recurrence_options": {"trips": 3}}),
    "loop, mixed": ("loop+depth_attention", {"recurrence_options": {"trips": 3, "prelude": 1, "coda": 1}}),
}
PONDERING = {
    "same, halting": ("adaponder+depth_attention", {"recurrence_options": {"trips": 3, "tau": 0.2, "top_k": 9}}),
    "duo, halting": ("latent_cot+uniform_depth", {"recurrence_options": {"trips": 3, "tau": 0.6}}),
    "all": ("ponder2+depth_attention", {"recurrence_options": {"trips": 3, "prefill": "exact"}}),
    "all, halting": ("ponder3+depth_attention", {"recurrence_options": {"trips": 3, "tau": 0.35, "prefill": "exact"}}),
}
every_mechanism = pytest.mark.parametrize("case", MECHANISMS)
mixing = pytest.mark.parametrize(
    "case", [c for c, (name, _) in MECHANISMS.items() if "depth" in name or "value" in name]
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def model_of(case, **fields):
    """A model that is far from its initial state, in double precision."""
    name, options = {**MECHANISMS, **PONDERING}[case]
    torch.manual_seed(0)
    model = FathomForCausalLM(tiny_config(**{**parse_mechanism(name), **options, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


def mixers_saw(model, ids):
    """What every mixer was given and gave, visit by visit, caught by hooks of the test's own."""
    seen = []
    handles = [
        layer.self_attn.mixer.register_forward_hook(lambda _, given, out: seen.append((*given, out)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


def softmax_over_depth(query, key, sources, bias):
    """α from the equation of the paper, head by head."""
    keys = torch.stack([*sources[::2], key])[:, 0]  # [M, H_kv, T, D]
    group = query.shape[1] // key.shape[1]
    mean = query[0].unflatten(0, (key.shape[1], group)).mean(1)
    scores = torch.einsum("htd,mhtd->thm", mean, keys) / math.sqrt(query.shape[-1])
    scores[..., -1] += bias
    return scores.softmax(-1).numpy()


@mixing
def test_weights_are_the_models(case, tokenizer):
    model = model_of(case)
    data = look(model, tokenizer, TEXT)
    seen = mixers_saw(model, torch.tensor([tokenizer(TEXT).input_ids]))
    assert len(data.weights) == len(seen) == len(data.visits)
    raw = [value for _, _, value, _, _ in seen]
    for i, ((query, key, value, sources, mixed), alpha) in enumerate(zip(seen, data.weights, strict=True)):
        assert np.abs(alpha.sum(-1) - 1).max() < 1e-12
        assert len(data.sources[i]) == len(sources) // 2 + 1 and data.sources[i][-1] == i
        # They add up the very values that the mixer was given to the value that it gave.
        values = torch.stack([*sources[1::2], value])[:, 0].permute(2, 1, 0, 3).numpy()  # [T, H_kv, M, D]
        built = (alpha[..., None] * values).sum(2)
        assert np.abs(built - mixed[0].transpose(0, 1).numpy()).max() < 1e-12
        if model.config.mixer == "depth_attention" and sources:
            bias = model.config.mixer_options["self_bias"]
            blend, own = model.config.mixer_options["blend"], np.eye(alpha.shape[-1])[-1]

            def weights(of, query=query, key=key, bias=bias, blend=blend, own=own):
                return own + blend * (softmax_over_depth(query, key, of, bias) - own)

            assert np.abs(alpha - weights(sources)).max() < 1e-12
            shuffled = (*sources[2:], *sources[:2]) if len(sources) > 2 else (sources[0].flip(2), sources[1])
            assert np.abs(alpha - weights(shuffled)).max() > 1e-2 * blend
    # Followed down, the origins build the same value from raw values alone.
    for (*_, mixed), origin in zip(seen, data.origins(), strict=True):
        built = sum(origin[..., j, None] * raw[j][0].transpose(0, 1).numpy() for j in range(len(raw)))
        assert np.abs(origin.sum(-1) - 1).max() < 1e-12
        assert np.abs(built - mixed[0].transpose(0, 1).numpy()).max() < 1e-12


@pytest.mark.quick("vanilla", "depth_attention", "denseformer", "hyper_connections", "loop, mixed")
@every_mechanism
def test_predictions_are_the_models(case, tokenizer, monkeypatch):
    monkeypatch.setattr(lens, "LOGITS_AT_ONCE", 2000)  # a few rows
    model = model_of(case)
    data = look(model, tokenizer, TEXT, top=7)
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        logprobs = out.logits[0].log_softmax(-1)
        expected = -logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy() / math.log(2)
        assert np.isnan(data.surprisal[0]) and np.abs(data.surprisal[1:] - expected).max() < 1e-12
        assert np.abs(data.next_surprisal[-1, :-1] - expected).max() < 1e-12
        assert data.bits_per_token == pytest.approx(expected.mean())
        # `hidden_states` holds what every visit reads: what the one before it left.
        states = [*out.hidden_states[1:-1], None]
        for i, state in enumerate(states):
            if state is not None:
                assert (data.visits[i][1] > 0) == (i >= len(model.model.plan[0]))
                logprobs_here = model.lm_head(model.model.norm(state))[0].log_softmax(-1)
            else:
                logprobs_here = logprobs
            best = logprobs_here.topk(7)
            assert np.abs(data.probabilities[i] - best.values.exp().numpy()).max() < 1e-12
            words = [[data.vocabulary[w] for w in row] for row in data.predictions[i]]
            assert words[0] == [spell(tokenizer, int(w)) for w in best.indices[0]]
    assert data.trips == [len(model.model.plan)] * len(data.tokens)
    assert len({trip for _, trip in data.visits}) == len(model.model.plan)


@pytest.mark.quick("all, halting", "same, halting")
@pytest.mark.parametrize("case", PONDERING)
def test_pondering_is_seen_trip_by_trip(case, tokenizer):
    model = model_of(case)
    data = look(model, tokenizer, SHORT)
    ids = torch.tensor([tokenizer(SHORT).input_ids])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
        expected = -out.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy() / math.log(2)
        assert np.abs(data.surprisal[1:] - expected).max() < 1e-12
        best = out.logits[0].softmax(-1).topk(5)
        assert np.abs(data.said_probabilities - best.values.numpy()).max() < 1e-12
        assert data.trips == ([3] * ids.shape[1] if out.trips is None else out.trips[0].tolist())
        assert data.halts == ("halting" in case) and max(data.trips) <= 3
        # What visit i leaves is what visit i + 1 of the same trip reads.
        for i, (layer, trip) in enumerate(data.visits):
            assert (layer, trip) == (i % 4, i // 4)
            if layer < 3:
                found = model.lm_head(model.model.norm(out.hidden_states[i + 1]))[0].softmax(-1).topk(5).values
                assert np.abs(data.probabilities[i] - found.numpy()).max() < 1e-12
        # Decoding token by token, each slot by itself, mixes with the same weights.
        seen = [[] for _ in data.visits]
        handles = [
            layer.self_attn.mixer.register_forward_hook(lambda *call: rows.append(call)) for layer in model.model.layers
        ]
        cache = None
        for t in range(ids.shape[1]):
            rows = []
            cache = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).past_key_values
            assert len(rows) == 4 * data.trips[t]
            for i, (mixer, given, _) in enumerate(rows):
                seen[i].append((t, lens.mixture(mixer, *given)[0].numpy()))
        for handle in handles:
            handle.remove()
    for i, tokens in enumerate(seen):
        for t, mine in tokens:
            assert np.abs(data.weights[i][t if len(data.weights[i]) > 1 else 0] - mine).max() < 1e-9
    means = data.averages()
    reached = [i for i, tokens in enumerate(seen) if tokens]
    for i in reached:
        assert means.weights[i] == pytest.approx(np.mean([mine.mean(0) for _, mine in seen[i]], 0))


@pytest.mark.quick("loop", "all, halting")
@pytest.mark.parametrize("case", ["loop", *PONDERING])
def test_no_more_trips_are_seen_than_are_served(case, tokenizer):
    """A configuration's `max_trips` is what every call makes: as many visits, and their predictions."""
    model = model_of(case)
    most = len(model.model.plan)
    whole = look(model, tokenizer, SHORT)
    for trips in {1, most - 1}:
        model.config.max_trips = trips
        data = look(model, tokenizer, SHORT)
        assert len(data.visits) == len(data.probabilities) == trips * len(whole.visits) // most
        assert max(data.trips) <= trips and (not whole.weights or len(data.weights) == len(data.visits))
        with torch.no_grad():
            best = model(torch.tensor([tokenizer(SHORT).input_ids]), use_cache=False).logits[0].softmax(-1).topk(5)
        assert np.abs(data.said_probabilities - best.values.numpy()).max() < 1e-12


def spell(tokenizer, index):
    """One token as text, or its bytes."""
    text = tokenizer.decode([index])
    if "\ufffd" not in text:
        return text
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's alphabet of bytes
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
    return "⟨" + " ".join(f"{letters[c]:02X}" for c in tokenizer.convert_ids_to_tokens(index)) + "⟩"


def test_averages(tokenizer):
    data = look(model_of("window"), tokenizer, TEXT)
    means = data.averages()
    for i, alpha in enumerate(data.weights):
        assert means.weights[i] == pytest.approx(alpha.mean((0, 1)))
        assert sum(means.weights[i]) == pytest.approx(1) and sum(means.origins[i]) == pytest.approx(1)
        assert means.own[i] == means.weights[i][-1] == pytest.approx(means.origins[i][i])
        assert means.entropy[i] == pytest.approx(-(alpha * np.log2(alpha)).sum(-1).mean())
    # A window's source may itself have read what this layer did not.
    assert means.origins[3][1] > 0 and 1 not in data.sources[3]


def test_uniform_weights_and_their_origins(tokenizer):
    means = look(model_of("uniform_depth"), tokenizer, TEXT).averages()
    assert means.origins[3] == pytest.approx([1 / 2, 0, 1 / 6, 1 / 3])
    assert means.entropy[3] == pytest.approx(math.log2(3))


def test_denseformer_shows_its_weights(tokenizer):
    model = model_of("denseformer")
    rows = look(model, tokenizer, TEXT).layer_weights
    for layer, row in enumerate(rows):
        alpha = model.model.layers[layer].mlp_residual.alpha.tolist()
        read = [j for j in range(layer + 2) if j % 2 == (layer + 1) % 2]
        assert [row[j] for j in read] == alpha
        assert all(row[j] is None for j in range(len(row)) if j not in read)
    assert look(model_of("depth_attention"), tokenizer, TEXT).layer_weights is None


def test_tokens_are_the_text(tokenizer):
    data = look(model_of("vanilla"), tokenizer, TEXT)
    assert "".join(data.tokens) == TEXT
    part = look(model_of("vanilla"), tokenizer, TEXT, max_tokens=9)
    assert part.tokens == data.tokens[:9] and part.dropped == len(data.tokens) - 9
    assert "" in data.tokens  # a character of several tokens
    assert [data.vocabulary[i] for i in data.labels[:3]] == data.tokens[:3]
    assert all(
        re.fullmatch("⟨[0-9A-F ]+⟩", data.vocabulary[i]) for i, t in zip(data.labels, data.tokens, strict=True) if not t
    )
    wide = look(model_of("vanilla", vocab_size=500), tokenizer, TEXT, top=500)
    assert {"#384", "#499"} <= set(wide.vocabulary)  # a head larger than the vocabulary
    assert data.averages().own == [1.0] * 4


def test_the_model_is_left_as_it_was(tokenizer):
    model = model_of("depth_attention").train()
    before = look(model, tokenizer, TEXT)
    assert model.training and not any(module._forward_hooks for module in model.modules())

    # A server's other threads use the model in the middle of a look.
    busy = []

    def meanwhile(*_):
        if not busy:
            other = threading.Thread(target=lambda: model(torch.tensor([[5, 6, 7]])))
            busy.append(other)
            other.start()
            other.join()

    handle = model.model.layers[0].register_forward_hook(meanwhile)
    again = look(model, tokenizer, TEXT)
    handle.remove()
    assert busy and all(np.array_equal(a, b) for a, b in zip(before.weights, again.weights, strict=True))


def test_what_cannot_be_looked_at(tokenizer):
    model = model_of("vanilla")
    with pytest.raises(SettingsError, match="no text"):
        look(model, tokenizer, "")
    with pytest.raises(SettingsError, match="1 or more"):
        look(model, tokenizer, "a", top=0)
    one = look(model, tokenizer, "a")
    assert len(one.tokens) == 1 and math.isnan(one.bits_per_token)
    assert one.to_dict()["bits_per_token"] is None
    json.dumps(pack(one), allow_nan=False)
    assert len(look(model, tokenizer, "a " * 2000).tokens) == model.config.max_position_embeddings


def test_packing_keeps_the_numbers(tokenizer):
    data = look(model_of("loop, mixed"), tokenizer, TEXT)
    packed = json.loads(json.dumps(pack(data), allow_nan=False))["models"][0]
    for (tokens, heads, kind, text), alpha in zip(packed["alphas"], data.weights, strict=True):
        found = np.frombuffer(base64.b64decode(text), f"<{kind}").reshape(tokens, heads, -1).astype(int)
        assert (found.sum(-1) == packed["steps"]).all()
        assert np.abs(found / packed["steps"] - alpha).max() <= 1 / packed["steps"]
    assert (quantise(np.full((2, 3), 1 / 3), 255).sum(-1) == 255).all()
    assert quantise(np.array([[0.5, 0.25, 0.25]]), 255).tolist() == [[127, 64, 64]]


def test_page_loads_nothing(tokenizer):
    data = look(model_of("depth_attention"), tokenizer, TEXT, name="<b>&")
    page = lens_page(data)
    assert page.count("</script>") == 2 and "<!--" not in page and "{{" not in page
    assert not re.search(r'(src|href)="(?!data:)|https?:|@import|url\(', page)
    assert "connect-src 'none'" in page and "connect-src 'self'" in lens_page(data, live_endpoint="/lens")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, fields in {"deep": {}, "plain": {"mixer": "none"}}.items():
        export_tiny(root / name, **fields)
    for code in (root / "deep").glob("*.py"):
        code.write_text("raise SystemExit('the directory ran its code')")
    torch.manual_seed(0)
    stock = Qwen3Config(**{k: v for k, v in tiny_config().to_dict().items() if k in Qwen3Config().to_dict()})
    stock.architectures, stock.model_type = ["Qwen3ForCausalLM"], "qwen3"
    Qwen3ForCausalLM(stock).save_pretrained(root / "stock")
    tokenizer.save_pretrained(root / "stock")
    export_tiny(root / "foreign")
    other = root / "foreign" / "tokenizer.json"
    known = json.loads(other.read_text())
    known["model"]["vocab"] |= {"a": known["model"]["vocab"]["b"], "b": known["model"]["vocab"]["a"]}
    other.write_text(json.dumps(known))
    return root


def test_command(checkpoints, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["lens", str(checkpoints / "deep"), TEXT, "-o", str(page), "--top", "3"]) == 0
    assert "bits per token" in capsys.readouterr().out and "<title>deep" in page.read_text()

    source = tmp_path / "text.txt"
    source.write_text(TEXT, encoding="utf-8-sig")
    stock = ["lens", str(checkpoints / "stock"), "--file", str(source), "--json"]
    assert main([*stock, "--compare", str(checkpoints / "plain"), "--max-tokens", "12"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [m["model"] for m in models] == ["stock", "plain"] and all(len(m["tokens"]) == 12 for m in models)
    assert models[0]["mechanism"] == "vanilla" and models[0]["surprisal"][0] is None

    reference = Qwen3ForCausalLM.from_pretrained(checkpoints / "stock")
    ids = torch.tensor([tiny_tokenizer()(TEXT).input_ids[:12]])
    with torch.no_grad():
        loss = reference(ids, labels=ids).loss.item()
    assert models[0]["bits_per_token"] == pytest.approx(loss / math.log(2), abs=1e-5)


def test_command_says_where_the_text_was_cut(checkpoints, tmp_path, capsys, monkeypatch):
    warned = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", lambda *words: warned.append(words))
    source, limit = tmp_path / "text.txt", tiny_config().max_position_embeddings
    source.write_text("a " * 4 * limit)
    total = len(tiny_tokenizer()(source.read_text(), verbose=False).input_ids)
    command = ["lens", str(checkpoints / "deep"), "-o", str(tmp_path / "page.html")]
    assert main([*command, "--file", str(source)]) == 0 and warned == []
    assert f"deep: the first {limit:,} of {total:,} tokens, " in capsys.readouterr().out
    assert main([*command, "a b"]) == 0
    assert "first" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deep"], "give a text or --file FILE, one of the two"),
        (["deep", "a", "--file", "b"], "give a text or --file FILE, one of the two"),
        (["deep", "a", "--compare", "foreign"], "different tokenizers"),
        (["deep", "--file", "nowhere.txt"], "nowhere.txt"),
        (["deep", ""], "no text"),
        (["deep", "a", "-o", "nowhere/page.html"], "nowhere is not a directory"),
        (["nowhere", "a"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(checkpoints, words, message, capsys):
    known = {"deep", "foreign"}
    assert main(["lens", *(str(checkpoints / word) if word in known else word for word in words)]) != 0
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fathom:")]
    assert len(error) == 1 and message in error[0]


# ---- the page, in a browser ----


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Write a page, open it, and afterwards see that it neither complained nor asked the network for anything."""
    browser.complaints.clear()
    browser.requests.clear()

    def visit(data, compare=None, **window):
        path = tmp_path / "lens.html"
        path.write_text(lens_page(data, compare=compare), encoding="utf-8")
        browser.open(path.as_uri(), **window)
        return browser

    yield visit
    assert browser.complaints == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def shown(browser, table):
    """The cells of a table, row by row."""
    rows = f"[...document.querySelectorAll('{table} tbody tr')]"
    text = "cell => (cell.querySelector('svg') ? cell.querySelector('span') : cell).textContent.trim()"
    return browser.value(f"{rows}.map(row => [...row.querySelectorAll('td')].map({text}))")


def share(x):
    """As the page writes it."""
    return "1" if x >= 0.995 else "0" if x < 0.005 else f"{x:.2f}"[1:]


def close(text, x):
    return abs(float(text) - x) < 0.00501


def white(text):
    """What cannot be seen, as the page writes it."""
    names = {" ": "␣", "\n": "↵", "\t": "⇥", "\x7f": "U+7F"}
    return "".join(names.get(c) or (chr(0x2400 + ord(c)) if c < " " else c) for c in text)


def check_panel(browser, data, t):
    """Every number in the panel of token t is the data's."""
    assert browser.value("document.querySelector('#token .w').textContent") == white(
        data.tokens[t] or data.vocabulary[data.labels[t]]
    )
    for row, alpha in zip(shown(browser, "#view-0 .grid"), data.weights, strict=True):
        mean = alpha[t if len(alpha) > 1 else 0].mean(0)
        own, *others = [cell for cell in row if cell]
        assert close(own, mean[-1]) and len(others) == len(mean) - 1
        assert all(close(cell, x) for cell, x in zip(others, mean, strict=False))
    rows = shown(browser, "#view-0 [data-kind=layers]")
    assert len(rows) == len(data.visits)
    for v, row in enumerate(rows):
        for k, cell in enumerate(row[:-1]):
            word = white(data.vocabulary[data.predictions[v, t, k]])
            assert cell.startswith(word) and abs(float(cell[len(word) :]) - 100 * data.probabilities[v, t, k]) < 0.6
        if t + 1 < len(data.tokens):
            assert abs(float(row[-1]) - data.next_surprisal[v, t]) < 0.0511
    if t:
        said = browser.value("document.querySelector('#summary').textContent")
        assert abs(float(re.search(r"([\d.]+) bits", said)[1]) - data.surprisal[t]) < 0.0511


def test_measures_are_explained_and_a_short_text_leaves_no_half_empty(tokenizer, visit):
    """What is coloured is said; next to a short text stand the averages, and a long one keeps them below."""
    model = model_of("depth_attention")
    for text, short in (("The depth.", True), (TEXT * 12, False)):
        browser = visit(look(model, tokenizer, text), width=1280, height=900)
        said = browser.value("document.querySelector('#meaning').innerText")
        assert "Borrowed: the share" in said and "Settled: the layer after which" in said
        assert browser.value("document.querySelector('#page').contains(document.querySelector('#whole'))") is short
    browser = visit(look(model, tokenizer, "The depth."), width=390, height=800)
    said = browser.value("document.querySelector('#meaning').innerText")
    assert said.startswith("Surprisal: ") and "Borrowed" not in said, "a phone shows what is chosen"


@pytest.mark.parametrize("case", ["depth_attention", "window", "uniform_depth", "vanilla", "denseformer"])
def test_page_shows_the_data(case, tokenizer, visit):
    data = look(model_of(case), tokenizer, TEXT)
    mixes = any(len(row) > 1 for row in data.sources)
    browser = visit(data)
    assert browser.value("document.querySelectorAll('.t').length") == len(data.tokens)
    text = "document.querySelector('#text').innerText.replaceAll('↵', '')"
    assert browser.value(text).startswith(TEXT[:40])
    for t in (3, len(data.tokens) - 1):
        browser.hover(f"#t{t}")
        if mixes:
            check_panel(browser, data, t)
    averages = data.averages()
    tables = browser.value("document.querySelectorAll('#averages .grid').length")
    assert tables == 2 * mixes + (data.layer_weights is not None)
    if mixes:
        for row, mean, entropy in zip(
            shown(browser, "#averages .grid"), averages.weights, averages.entropy, strict=False
        ):
            own, *others = [cell for cell in row[: len(row) - 1] if cell]
            assert close(own, mean[-1]) and [share(x) for x in mean[:-1]] == others
            assert not row[-1] or close(row[-1], entropy)


class Gated(ValueMixer):
    """Somebody else's mixer: gates of its own decide how much of the layer below is read."""

    @staticmethod
    def source_layers(config, layer_idx):
        return (layer_idx - 1,) if layer_idx else ()

    def forward(self, query, key, value, sources):
        if not sources:
            return value
        gate = (key * sources[0]).sum(-1, keepdim=True).sigmoid()
        return gate * value + (1 - gate) * sources[1]


class Channels(Gated):
    """Another gate for each channel: no weights of values."""

    def forward(self, query, key, value, sources):
        return torch.lerp(value, sources[1], key.sigmoid()) if sources else value


class Loudest(Gated):
    """Weights that depend on the values themselves, said by the mixer."""

    def source_weights(self, query, key, value, sources):
        gates = [one.norm(dim=-1, keepdim=True) for one in (*sources[1::2], value)]
        return torch.cat(gates, -1).softmax(-1)

    def forward(self, query, key, value, sources):
        shares = self.source_weights(query, key, value, sources).unbind(-1)
        return sum(w[..., None] * v for w, v in zip(shares, (*sources[1::2], value), strict=True))


class Adding(Gated):
    """Weights that are no shares."""

    def forward(self, query, key, value, sources):
        return value - 2 * sources[1] if sources else value


def test_passes_without_values_of_their_own_are_named(tokenizer):
    """Later iterations of `kv: first` make no values; the first iteration's are mixed with weights."""
    loop = {"recurrence": "loop", "recurrence_options": {"trips": 2, "kv": "first"}}
    data = look(FathomForCausalLM(tiny_config(mixer="depth_attention", **loop)).eval(), tokenizer, SHORT)
    assert data.weights == [] and data.unshown == "not every layer pass adds up values with weights"


@pytest.fixture
def model_with(monkeypatch):
    """A model with a mixer that Fathom does not have."""

    def build(mixer):
        monkeypatch.setitem(registry.MECHANISMS, "theirs", Mechanism("theirs", "mixer", "", "", mixer, registry.free))
        return FathomForCausalLM(tiny_config(mixer="theirs")).eval().double()

    return build


@pytest.mark.parametrize("mixer", [Gated, Loudest, Adding])
def test_weights_of_a_mixer_that_fathom_does_not_have(mixer, tokenizer, model_with):
    model = model_with(mixer)
    data = look(model, tokenizer, TEXT)
    seen = mixers_saw(model, torch.tensor([tokenizer(TEXT).input_ids]))
    assert data.sources == [(0,), (0, 1), (1, 2), (2, 3)]
    for (*_, value, sources, mixed), alpha in zip(seen, data.weights, strict=True):
        values = torch.stack([*sources[1::2], value])[:, 0].permute(2, 1, 0, 3).numpy()
        assert np.abs((alpha[..., None] * values).sum(2) - mixed[0].transpose(0, 1).numpy()).max() < 1e-12
    assert data.unshown == ("weights are not shares of 1" if mixer is Adding else "")
    assert pack(data)["models"][0]["sources"] == ([] if mixer is Adding else data.sources)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_a_model_in_lower_precision(dtype, tokenizer):
    wide = look(model_of("blended"), tokenizer, SHORT)
    for one, other in zip(look(model_of("blended").to(dtype), tokenizer, SHORT).weights, wide.weights, strict=True):
        assert one.dtype == np.float32 and np.abs(one.sum(-1) - 1).max() < 1e-5
        assert np.abs(one - other).max() < (1e-4 if dtype is torch.float32 else 0.2)


def test_a_mixer_without_weights(tokenizer, visit, model_with):
    data = look(model_with(Channels), tokenizer, TEXT)
    assert data.sources == data.weights == [] and data.unshown
    browser = visit(data)
    assert data.unshown in browser.value("document.querySelector('#models').textContent")
    assert browser.value("document.querySelectorAll('.grid').length") == 0
    assert len(shown(browser, "[data-kind=layers]")) == 4


def test_page_shows_the_trips_that_were_made(tokenizer, visit):
    data = look(model_of("duo, halting"), tokenizer, TEXT)
    browser = visit(data)
    head = browser.value("document.querySelector('#models').textContent")
    assert f"{np.mean(data.trips):.2f} of 3 iterations" in head
    for trips in set(data.trips):
        t = data.trips.index(trips)
        browser.hover(f"#t{t}")
        assert f"It made {trips} of 3 iterations." in browser.value("document.querySelector('#summary').textContent")
        assert len(shown(browser, "#view-0 [data-kind=layers]")) == 4 * trips
        assert len(shown(browser, "#view-0 [data-kind=trips]")) == trips
        assert len(shown(browser, "#view-0 .grid")) == 4 * trips
    browser.click("input[value=trips] + *, label:has(input[value=trips])")
    colours = browser.value("[...document.querySelectorAll('.t')].map(t => +t.style.getPropertyValue('--v'))")
    assert colours == pytest.approx([(n - 1) / 2 for n in data.trips])


def test_loop_has_a_row_per_trip(tokenizer, visit):
    data = look(model_of("loop, mixed"), tokenizer, TEXT)
    browser = visit(data)
    browser.hover("#t4")
    check_panel(browser, data, 4)
    assert len(shown(browser, "[data-kind=trips]")) == 3
    ends = [max(i for i, (_, trip) in enumerate(data.visits) if trip == k) for k in range(3)]
    for row, v in zip(shown(browser, "[data-kind=trips]"), ends, strict=True):
        assert row[0].startswith(white(data.vocabulary[data.predictions[v, 4, 0]]))
    assert "3 iterations" in browser.value("document.querySelector('#summary').textContent")


def selected(browser):
    return browser.value("[...document.querySelectorAll('[aria-selected=true]')].map(x => +x.id.slice(1))")


def test_mouse_and_keyboard(tokenizer, visit):
    data = look(model_of("depth_attention"), tokenizer, TEXT)
    browser = visit(data)
    browser.hover("#t2")
    browser.hover("#t5")
    assert selected(browser) == [5]
    browser.click("#t6")
    browser.hover("#t9")
    assert selected(browser) == [6]  # pinned
    for key, t in [("ArrowRight", 7), ("ArrowLeft", 6), ("Home", 0), ("ArrowLeft", 0), ("End", len(data.tokens) - 1)]:
        browser.value("document.querySelector('#text').focus()")
        browser.press(key)
        assert selected(browser) == [t]
        assert browser.value("document.querySelector('#text').getAttribute('aria-activedescendant')") == f"t{t}"
        check_panel(browser, data, t)
    browser.press("Escape")
    browser.hover("#t3")
    assert selected(browser) == [3]
    browser.click("#on")
    assert selected(browser) == [4]
    # One head by itself, and origins in place of weights.
    browser.value(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change', {bubbles: true})) })"
        "(document.querySelector('select'))"
    )
    cells = [[c for c in row if c] for row in shown(browser, "#view-0 .grid")]
    assert all(
        close(row[0], alpha[4 if len(alpha) > 1 else 0, -1][-1]) for row, alpha in zip(cells, data.weights, strict=True)
    )
    browser.value("document.querySelector('[value=origins]').click()")
    origins = list(data.origins())[3][4, 1]
    assert all(
        close(c, x)
        for c, x in zip([c for c in shown(browser, "#view-0 .grid")[3] if c], origins[[3, 0, 2]], strict=True)
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone(tokenizer, visit, dark):
    data = look(model_of("loop, mixed"), tokenizer, TEXT + "\n" + "word" * 40)
    for compare in (None, look(model_of("dense, biased"), tokenizer, TEXT + "\n" + "word" * 40)):
        browser = visit(data, compare, width=390, height=844, dark=dark, touch=True)
        assert browser.value("document.documentElement.scrollWidth") <= 390
        browser.tap("#t1")
        assert selected(browser) == [1]
    assert browser.value("document.querySelectorAll('#views .view').length") == 2


def test_compare(tokenizer, visit):
    a, b = (look(model_of(case), tokenizer, TEXT, name=case) for case in ("depth_attention", "loop, mixed"))
    browser = visit(a, b)
    browser.hover("#t4")
    check_panel(browser, a, 4)
    assert len(shown(browser, "#view-1 [data-kind=layers]")) == len(b.visits)
    browser.value("document.querySelector('[value=difference]').click()")
    apart = b.surprisal - a.surprisal
    signs = browser.value(
        "[...document.querySelectorAll('.t')].map(x => x.classList.contains('warm') - x.classList.contains('cool'))"
    )
    assert signs[1:] == [int(np.sign(x)) if abs(x) > 1e-3 else s for x, s in zip(apart[1:], signs[1:], strict=True)]


@pytest.mark.slow
def test_live(tokenizer, browser):
    model = model_of("depth_attention")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer("text/html", lens_page(look(model, tokenizer, "first"), live_endpoint="/look"))

        def do_POST(self):
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
            try:
                answer = pack(look(model, tokenizer, text, max_tokens=1 if text == "one" else 99))
            except SettingsError as error:
                answer = {"error": str(error)}
            self.answer("application/json", json.dumps({"error": "too deep"} if text == "deep" else answer))

        def answer(self, kind, body):
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    browser.complaints.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        type_in = "(text => {{ const box = document.querySelector('#prompt'); box.value = text; "
        type_in += "box.dispatchEvent(new Event('input', {{bubbles: true}})) }})({})"
        browser.value(type_in.format(json.dumps("The dark water")))
        browser.until("document.querySelector('#text').innerText === 'The dark water'")
        expected = look(model, tokenizer, "The dark water")
        browser.hover("#t2")
        check_panel(browser, expected, 2)
        browser.value(type_in.format(json.dumps("deep")))
        browser.until("document.querySelector('#status').textContent === 'too deep'")
        browser.value(type_in.format(json.dumps("one")))
        browser.until("document.querySelectorAll('.t').length === 1")
        server.shutdown()
    assert browser.complaints == []


@pytest.mark.slow
def test_two_thousand_tokens(tokenizer, visit):
    model = model_of("dense, biased", max_position_embeddings=2048, num_hidden_layers=8)
    data = look(model, tokenizer, "Who fathoms the deep?\n" * 600)
    assert len(data.tokens) == 2000 and data.dropped > 0
    browser = visit(data)
    dropped = browser.value("document.querySelector('#dropped').textContent")
    assert dropped == f"Shown are the first 2,000 of {2000 + data.dropped:,} tokens."
    times = """new Promise(done => {
        const text = document.querySelector('#text'), times = [];
        for (let i = 0; i < 41; i++) {
            const start = performance.now();
            text.dispatchEvent(new KeyboardEvent('keydown', {key: 'PageDown'}));
            document.body.offsetHeight;  // lay out
            times.push(performance.now() - start);
        }
        done(times.sort((a, b) => a - b)[20]);
    })"""
    assert browser.value(times) < 500  # milliseconds; a tenth of it is usual
    assert selected(browser) == [1999]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mixed"), [("exaone4", True), pytest.param("qwen3_5_text", False, marks=pytest.mark.slow)]
)
def test_a_familys_own_layers(family, mixed, tokenizer):
    """Also where layers return more than their state; layers without keys have no weights to show."""
    named = {"residual": "attention_residuals", "mixer": "depth_attention", "mixer_options": {"stride": 1}}
    model = ours_of(theirs_of(family, vocab_size=len(tokenizer)), **named)
    found = look(model, tokenizer, SHORT)
    assert len(found.visits) == model.config.num_hidden_layers
    assert len(found.weights) == mixed * len(found.visits)
    assert np.array_equal(found.predictions[-1], found.said)
