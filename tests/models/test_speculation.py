"""Drafting with the first trips: the tokens, or the distribution, of plain decoding."""

import random

import pytest
import scipy.stats
import torch
from transformers import LogitsProcessorList

from fathom.models import FathomConfig
from fathom.models.registry import parse_mechanism
from fathom.models.trips import speculation
from fathom.models.trips.speculation import Speculation, Stages, accept
from tests.tiny import seeded

from .cases import SHAPE, build, config_of

MIXERS = ["", "+depth_attention", "+uniform_depth", "+value_residual"]
RESIDUALS = ["", "+denseformer", "+attention_residuals", "+hyper_connections"]


def greedy(model, prompts, new, **arguments):
    """Left-padded rows in one call."""
    model.generation_config.eos_token_id = None
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **arguments)
    return made[:, width:].tolist()


def drawn(seed):
    """A model of two to four trips whose drafts are often right, and prompts."""
    chance = random.Random(seed)
    recurrence, trips = chance.choice(["loop", "ponder"]), chance.randint(2, 4)
    if recurrence == "loop":
        options = {"trips": trips, "prelude": chance.randint(0, 1)}
        if seed % 3 == 0:
            options |= {"injection": "diagonal", "norm_between": "own", "entry_norm": seed % 2 == 0}
    else:
        options = {"trips": trips, "top_k": chance.choice([0, 7]), "feed": chance.choice(["mixture", "hidden"])}
    name = recurrence + chance.choice(MIXERS) + chance.choice(RESIDUALS)
    shape = {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    }
    fields = {**SHAPE, **parse_mechanism(name), "recurrence_options": options, **(shape if seed % 5 == 4 else {})}
    model = build(FathomConfig(**fields), seed)
    with torch.no_grad():  # the later trips change less, so that drafts are accepted now and then
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(0.3)
            layer.self_attn.o_proj.weight.mul_(0.3)
    rows = 1 if seed % 2 else chance.randint(2, 4)
    prompts = [[chance.randrange(3, 61) for _ in range(chance.randint(1, 20))] for _ in range(rows)]
    asked = Speculation(chance.randint(1, trips - 1), chance.randint(1, 8))
    return name, model, prompts, chance.randint(1, 24), asked


@pytest.mark.quick("1", "2", "4", "5", "6", "7")
@pytest.mark.parametrize("seed", range(250))
def test_greedy_tokens_are_those_of_generate(seed):
    name, model, prompts, new, asked = drawn(seed)
    assert greedy(model, prompts, new, speculation=asked) == greedy(model, prompts, new), name
    assert asked.tokens == new * len(prompts) and 0 <= asked.acceptance <= 1


def test_drafts_are_accepted_and_counted():
    """Where later trips hardly matter most drafts are right, and verifications few; where they do, many."""
    model = build(config_of("loop"))
    prompts, wild, tame = [[5, 9, 31, 7]], Speculation(1, 6), Speculation(1, 6)
    greedy(model, prompts, 40, speculation=wild)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1e-4)
            layer.self_attn.o_proj.weight.mul_(1e-4)
    assert greedy(model, prompts, 40, speculation=tame) == greedy(model, prompts, 40)
    assert tame.tokens == wild.tokens == 40
    assert tame.verifications == 5 and wild.verifications > 12, "6 + 7 + 8 + 9 + 10 tokens"
    assert tame.acceptance == 1 and tame.tokens_per_verification == 8 and wild.acceptance < 0.5


@pytest.mark.parametrize("case", ["loop@gpt2", "loop@gemma"])
def test_drafts_start_from_what_the_decoder_reads(case):
    """With the embeddings of positions, and a scale in the weights' precision."""
    model, ids = build(config_of(case), dtype=torch.bfloat16), torch.tensor([[5, 9, 31, 7], [8, 4, 12, 44]])
    stages = Stages(model, 2)
    found = []
    model.model.layers[0].register_forward_pre_hook(lambda layer, given: found.append(given[0]))
    with torch.no_grad():
        model(ids, use_cache=False)
    positions = torch.arange(4).expand(2, -1)
    assert torch.equal(stages.embed(ids, positions), found[0])
    assert not torch.equal(model.model.embed_tokens(ids) * model.model.embedding_scale, found[0])


def test_controls(monkeypatch):
    """Caches that are not cropped, or drafts taken as they are, give other tokens."""
    _, model, prompts, _, asked = drawn(1)
    expected = greedy(model, prompts, 20)
    with monkeypatch.context() as planted:
        planted.setattr(Stages, "crop", lambda self, tokens: None)
        assert greedy(model, prompts, 20, speculation=asked) != expected
    everything = lambda self, ids, drafts: (drafts.tokens, torch.full((len(ids),), drafts.tokens.shape[1]))  # noqa: E731
    monkeypatch.setattr(speculation._Run, "verify", everything)
    assert greedy(model, prompts, 20, speculation=asked) != expected


def test_stops_processors_and_budgets():
    """End tokens row by row, penalties, `max_trips`, a streamer."""
    _, model, _, _, _ = drawn(2)
    prompts = [[5, 9, 31, 7], [44, 3], [8]]
    for settings in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"max_trips": 2}):
        assert greedy(model, prompts, 8, draft_trips=1, **settings) == greedy(model, prompts, 8, **settings)
    plain = greedy(model, prompts, 8)
    end = [plain[0][4], plain[1][2]]
    given = {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]), "max_new_tokens": 8}
    ids = torch.tensor([[5, 9, 31, 7], [0, 0, 44, 3], [0, 0, 0, 8]])
    stopped = [
        model.generate(ids, do_sample=False, eos_token_id=end, pad_token_id=0, **given, **more).tolist()
        for more in ({}, {"draft_trips": 1, "draft_tokens": 5})
    ]
    assert stopped[0] == stopped[1]


def test_holes_in_a_mask_count_for_no_position():
    """`generate` makes such a mask by itself where a prompt has the padding token within."""
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
    ids = torch.tensor([[5, 9, 0, 31, 0, 7], [0, 44, 0, 0, 12, 4], [8, 8, 3, 5, 6, 9]])
    for seed in (1, 2):
        _, model, _, _, _ = drawn(seed)
        for given in ({"attention_mask": mask}, {}):
            given |= {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            assert torch.equal(model.generate(ids, **given), model.generate(ids, draft_trips=1, **given))


def test_draws_have_the_distribution():
    """Chi-square over 50,000 rounds: the first token, and the one after an accepted draft, are as the whole model's."""
    torch.manual_seed(0)
    p, q = torch.randn(2, 3, 7, dtype=torch.float64).mul(1.5).softmax(-1)
    rows = 50_000
    drafts = torch.stack([torch.multinomial(one, rows, replacement=True) for one in q], 1)
    new, accepted = accept(p.expand(rows, 3, 7), q.expand(rows, 3, 7), drafts)
    for place in range(3):
        reached = new[accepted >= place, place]
        counts = reached.bincount(minlength=7)
        assert scipy.stats.chisquare(counts, len(reached) * p[place].numpy()).pvalue > 1e-3
    taken = drafts[:, 0].bincount(minlength=7)
    assert scipy.stats.chisquare(taken, rows * p[0].numpy()).pvalue < 1e-6, "drafts as they are would be seen"


def misfit(tokens, p):
    """p-value of `tokens` `[n]` against rows `[n, V]` of a few distributions: chi-squares of the groups, added."""
    total, freedom = 0.0, 0
    for row in p.unique(dim=0):
        counts = tokens[(p == row).all(1)].bincount(minlength=len(row))
        expected = counts.sum() * row.double()
        total += float(((counts - expected) ** 2 / expected)[expected > 0].sum())
        freedom += len(row) - 1
    return scipy.stats.chi2.sf(total, freedom)


@pytest.mark.slow
def test_verified_drafts_have_the_distribution(monkeypatch):
    """50,000 in one batch: every place that is reached, given the tokens before it; and not without the correction."""
    model = build(FathomConfig(**{**SHAPE, "vocab_size": 7, "recurrence": "loop", "pad_token_id": 0}))
    torch.manual_seed(2)
    ids, seen = torch.tensor([[5, 3, 6]]).expand(50_000, -1), []
    monkeypatch.setattr(speculation, "accept", lambda *given: seen.append(given) or accept(*given))
    with torch.no_grad():
        run = speculation._Run(Stages(model, 3), 1, torch.ones_like(ids), LogitsProcessorList(), True)
        run.read(ids[:, :-1])
        drafts = run.draft(ids, 2)
        new, accepted = run.verify(ids, drafts)
        first = model(ids[:1]).logits[0, -1].softmax(-1)
        after = [model(torch.tensor([[5, 3, 6, t]])).logits[0, -1].softmax(-1) for t in range(7)]
    on = accepted > 0
    given = torch.stack(after)[new[:, 0]]
    assert on.sum() > 5000 and (~on).sum() > 5000
    assert misfit(new[:, 0], first.expand(50_000, -1)) > 1e-3 and misfit(new[on, 1], given[on]) > 1e-3
    p = seen[0][0]
    torch.testing.assert_close(p[on, 1], given[on], rtol=1e-4, atol=1e-5)
    again = torch.where(on, drafts.tokens[:, 0], torch.multinomial(p[:, 0], 1).squeeze(1))
    assert misfit(again, first.expand(50_000, -1)) < 1e-6, "drawn anew from the whole of p"
    assert misfit(drafts.tokens[:, 0], first.expand(50_000, -1)) < 1e-6, "drafts as they are"


@pytest.mark.parametrize("name", ["loop", "loop+depth_attention", "ponder"])
def test_early_loss_is_of_what_fewer_trips_say(name):
    """loss + w times the mean loss under budgets of fewer trips, gradients too; nothing where it is off."""
    fields = {**SHAPE, **parse_mechanism(name)}
    model = build(FathomConfig(**fields, recurrence_options={"trips": 3, "early_loss": 0.5})).train()
    ids = torch.randint(3, 61, (2, 12), generator=seeded(0))

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return model.model.layers[1].mlp.up_proj.weight.grad.clone()

    out = model(ids, labels=ids)
    found, term = gradient(out.loss), out.aux_losses["early"]
    model.model.recurrence.early_weight = 0.0
    plain = model(ids, labels=ids)
    assert not plain.aux_losses
    fewer = [model(ids, labels=ids, max_trips=trips).loss for trips in (1, 2)]
    assert float(term) == pytest.approx(0.5 * sum(map(float, fewer)) / 2, rel=1e-5)
    torch.testing.assert_close(found, gradient(plain.loss + 0.25 * (fewer[0] + fewer[1])), rtol=1e-4, atol=1e-6)


def test_early_loss_is_of_every_trip_that_was_drawn():
    """Of training steps that make more trips than `trips`, which is what the others make."""
    options = {"trips": 2, "trips_range": [1, 4], "early_loss": 0.5}
    model = build(FathomConfig(**{**SHAPE, **parse_mechanism("ponder"), "recurrence_options": options})).train()
    ids = torch.randint(3, 61, (2, 12), generator=seeded(0))
    term = model(ids, labels=ids, max_trips=4).aux_losses["early"]
    fewer = [float(model.eval()(ids, labels=ids, max_trips=trips).loss) for trips in (1, 2, 3)]
    assert float(term) == pytest.approx(0.5 * sum(fewer) / 3, rel=1e-5)


def test_the_cache_ends_where_the_text_does():
    """An end token inside a run of accepted drafts: what was drafted after it is not in the cache that is returned."""
    model = build(config_of("loop"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1e-4)
            layer.self_attn.o_proj.weight.mul_(1e-4)
    ids, asked = torch.tensor([[5, 9, 31, 7]]), Speculation(1, 6)
    end = int(model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)[0, -1])
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    out = model.generate(ids, speculation=asked, return_dict_in_generate=True, **how)
    length = out.sequences.shape[1]
    assert asked.accepted == 6 and length < 10, "the drafts after the end were right too"
    assert {layer.get_seq_length() for layer in out.past_key_values.layers} == {length - 1}


@pytest.mark.parametrize(
    "case,settings,words",
    [
        ("loop", {"draft_trips": 1, "max_trips": 9}, "max_trips must be between 1 and 3"),
        ("loop", {"draft_trips": 1, "max_trips": 0}, "max_trips must be between 1 and 3"),
        ("ponder2", {"draft_trips": 1}, "recurrence=ponder2 cannot be computed by themselves"),
        ("adaponder", {"draft_trips": 1}, "recurrence=adaponder cannot be computed by themselves"),
        ("loop-middle", {"draft_trips": 1}, "a coda"),
        ("loop+depth_attention-shared", {"draft_trips": 1}, r"draft_trips: .* set recurrence_options\.kv to own"),
        ("loop", {"draft_trips": 3}, "between 1 and 2"),
        ("vanilla", {"draft_trips": 1}, "between 1 and 0"),
        ("loop", {"draft_trips": 1, "draft_tokens": 0}, "draft_tokens"),
        ("loop", {"draft_trips": 1, "num_beams": 2}, "leave out beams"),
        ("loop", {"draft_trips": 1, "guidance_scale": 1.5}, "draft_trips: guidance_scale reads every text once more"),
        ("loop", {"draft_trips": 1, "inputs_embeds": torch.zeros(1, 2, 32)}, "draft_trips: give input_ids"),
        ("loop", {"draft_trips": 1, "stop_strings": "."}, "draft_trips: stop_strings need a tokenizer"),
        ("loop", {"draft_trips": 1, "output_scores": True}, "draft_trips: output_scores is not kept"),
        ("loop", {"draft_trips": 1, "output_attentions": True}, "draft_trips: output_attentions is not kept"),
    ],
)
def test_what_cannot_be_drafted(case, settings, words):
    with pytest.raises(ValueError, match=words):
        greedy(build(config_of(case)), [[5, 6]], 4, **settings)


def test_what_a_checkpoint_asks_for_can_be_switched_off():
    """By None, as in transformers."""
    model = build(config_of("loop"))
    plain = greedy(model, [[5, 6]], 4)
    model.generation_config.stop_strings = ["a"]
    assert greedy(model, [[5, 6]], 4, draft_trips=1, stop_strings=None) == plain
    with pytest.raises(ValueError, match="draft_trips: stop_strings"):
        greedy(model, [[5, 6]], 4, draft_trips=1)
