"""Rows that join and leave a running batch, each as if it were alone."""

import contextlib
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MinPLogitsWarper,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fathom.errors import RequestError, SettingsError
from fathom.inference import batches, sampling
from fathom.inference.batches import LoneBatch, SlabBatch, SlabLayer, SlotBatch, batch_for, token_bytes
from fathom.inference.engine import Engine, Job
from fathom.inference.sampling import Choice
from fathom.iterations import counting
from fathom.kvcache.policy import Policy
from fathom.kvcache.prefill import continues
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import ALL, parse_mechanism
from fathom.models.trips import slot_table
from fathom.models.trips.engines import check_engine
from tests.models.cases import SHAPE, build, config_of

KINDS = {
    "vanilla": SlabBatch,
    "depth_attention": SlabBatch,
    "loop+depth_attention-grid": SlabBatch,
    "loop-middle": SlabBatch,
    "ponder": SlabBatch,
    "hyper_connections": SlabBatch,
    "ponder-hidden-duo": SlotBatch,
    "ponder2": SlotBatch,
    "ponder3": SlotBatch,
    "adaponder+depth_attention": SlotBatch,
    "latent_cot": SlotBatch,
}
BUDGET = 1 << 26
TWO = {"num_hidden_layers": 2}


def prompts_of(chance, count):
    return [[chance.randrange(3, 61) for _ in range(chance.randint(1, 30))] for _ in range(count)]


def alone(model, prompt, new, **arguments):
    model.generation_config.eos_token_id = None
    made = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, pad_token_id=0, **arguments)
    return made[0, len(prompt) :].tolist()


class Collected:
    """What an engine said to a job."""

    def __init__(self, *given, **settings):
        self.events, self.done = [], threading.Event()
        self.job = Job(*given, deliver=self.take, **settings)

    def take(self, event):
        self.events.append(event)
        if isinstance(event, str | Exception):
            self.done.set()

    def wait(self):
        assert self.done.wait(60)
        return self.events[-1]

    @property
    def tokens(self):
        return [event.token for event in self.events if hasattr(event, "token")]


def run(model, cases, trips=None, policy=None, seed=0):
    """The batch itself, rows joining, stepping and leaving at random."""
    chance, batch = random.Random(seed), batch_for(model, trips, policy)
    waiting, rows, made = list(enumerate(cases)), [], {i: [] for i in range(len(cases))}
    batch.reserve(len(cases), 64)
    reading = None
    with torch.inference_mode():
        while waiting or rows or reading:
            if batch.reads_several and reading is None and len(waiting) > 1 and chance.random() < 0.3:
                taken = [waiting.pop(0) for _ in range(chance.randint(2, min(3, len(waiting))))]
                for (i, _), row in zip(taken, batch.read_several([prompt for _, (prompt, _) in taken]), strict=True):
                    made[i].append(int(row.argmax()))
                    rows.append(i)
            if reading is None and waiting and (not rows or chance.random() < 0.5):
                reading = [*waiting.pop(0), 0]
            if reading is not None:
                i, (prompt, _), at = reading
                size = chance.randint(1, 12) if batches.may_chunk(model) else len(prompt)
                logits = batch.read(prompt[at : at + size])
                reading[2] = at + size
                if reading[2] >= len(prompt):
                    batch.join()
                    made[i].append(int(logits[-1].argmax()))
                    rows.append(i)
                    reading = None
            if rows and (chance.random() < 0.8 or reading is None):
                logits = batch.step([made[i][-1] for i in rows])
                for i, row in zip(list(rows), logits, strict=True):
                    made[i].append(int(row.argmax()))
            for i in [i for i in rows if len(made[i]) >= cases[i][1]]:
                place = rows.index(i)
                moved = batch.leave(place)
                rows[place] = rows[moved]
                rows.pop(moved)
    return [made[i][:new] for i, (_, new) in enumerate(cases)]


def compared(case, **shape):
    """What a batch makes of random rows, and what each row makes alone."""
    model, chance = build(config_of(case, **shape)), random.Random(case)
    cases = [(prompt, chance.randint(1, 12)) for prompt in prompts_of(chance, 5)]
    return run(model, cases, seed=1), [alone(model, *one) for one in cases]


@pytest.mark.quick("vanilla", "loop+*", "hyper_connections", "ponder-*", "adaponder+*")
@pytest.mark.parametrize("case", KINDS)
def test_rows_come_and_go_exactly(case):
    assert type(batch_for(build(config_of(case)))) is KINDS[case]
    together, one_by_one = compared(case)
    assert together == one_by_one


def test_what_would_fail_in_a_batch_is_refused(engine):
    """A job without a prompt: others in the batch would fail with it."""
    running, _ = engine("adaponder", num_hidden_layers=2)
    kept = Collected([5, 6, 7], 12, Choice())
    with pytest.raises(RequestError, match="no tokens"):
        running.submit([kept.job, Collected([], 3, Choice()).job])
    running.submit([kept.job])
    assert kept.wait() == "length" and len(kept.tokens) == 12


def test_trips_that_share_keys_make_the_same_texts():
    """One bank for each layer, as without a loop."""
    together, one_by_one = compared("loop", recurrence_options={"trips": 3, "prelude": 1, "kv": "first"})
    assert together == one_by_one


@pytest.mark.parametrize("prelude", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_tokens_that_are_sure_stop_in_a_batch_as_alone(prelude):
    """Rows of different depth, which join and leave; layers before the loop keep no slots of later trips."""
    options = {"trips": 3, "prelude": prelude, "exit_confidence": 0.3}
    together, one_by_one = compared("loop", recurrence_options=options)
    assert together == one_by_one
    assert together != compared("loop", recurrence_options=options | {"exit_confidence": None})[0]


def test_windows_slide_in_each_row():
    kinds = ["full_attention", "sliding_attention"] * 2
    together, one_by_one = compared("loop", layer_types=kinds, use_sliding_window=True, sliding_window=5)
    assert together == one_by_one


def test_fewer_trips_and_other_peoples_models():
    model, chance = build(config_of("loop")), random.Random(3)
    cases = [(prompt, 6) for prompt in prompts_of(chance, 4)]
    assert run(model, cases, trips=2) == [alone(model, *one, max_trips=2) for one in cases]
    torch.manual_seed(0)
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**SHAPE, initializer_range=0.5)).eval()
    assert type(batch_for(qwen3)) is SlabBatch
    assert run(qwen3, cases) == [alone(qwen3, *one) for one in cases]


def test_a_window_without_kinds_of_layers_slides():
    """Mistral's, which every layer has."""
    torch.manual_seed(0)
    mistral = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5, initializer_range=0.5)).eval()
    cases = [(prompt, 6) for prompt in prompts_of(random.Random(3), 4)]
    assert type(batch_for(mistral)) is SlabBatch
    assert run(mistral, cases) == [alone(mistral, *one) for one in cases]


def test_a_state_that_several_tokens_would_overwrite(monkeypatch):
    """Mamba's class begins anew if it continues by several tokens, so the server reads a whole prompt at once."""
    torch.manual_seed(0)
    small = dict(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4, eos_token_id=None)
    model = MambaForCausalLM(MambaConfig(**small, initializer_range=0.5)).eval()
    assert not batches.may_chunk(model) and continues(model, 1)
    prompts = prompts_of(random.Random(0), 2)
    expected = [alone(model, prompt, 4) for prompt in prompts]
    assert run(model, [(prompt, 4) for prompt in prompts]) == expected
    monkeypatch.setattr(batches, "may_chunk", lambda model: True)
    assert run(model, [(prompt, 4) for prompt in prompts]) != expected


def test_a_class_that_reads_no_cache_is_refused():
    small = dict(vocab_size=61, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, context_length=32)
    with pytest.raises(SettingsError, match="rwkv does not continue a text from transformers' cache"):
        Engine(RwkvForCausalLM(RwkvConfig(**small)).eval(), BUDGET)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_with_a_state_of_its_own_is_refused(dtype):
    """Texts that it reads by turns would overwrite one another's."""
    small = dict(vocab_size=61, hidden_size=16, num_hidden_layers=3, lru_width=16)
    heads = dict(num_attention_heads=2, intermediate_size=32, attention_window_size=16)
    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**small, **heads)).to(dtype).eval()
    with pytest.raises(SettingsError, match="recurrent_gemma does not continue a text"):
        Engine(model, BUDGET)


def test_caches_of_constant_size_take_turns():
    model, chance = build(config_of("vanilla")), random.Random(3)
    policy = Policy("sinks", 16, 2, 0.5)
    cases = [(prompt, 9) for prompt in prompts_of(chance, 3)]
    assert type(batch_for(model, policy=policy)) is LoneBatch
    expected = []
    for prompt, new in cases:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(
                ids, max_new_tokens=new, do_sample=False, eos_token_id=None, **policy.read(model, ids)
            )
        expected.append(made[0, len(prompt) :].tolist())
    assert run(model, cases, policy=policy) == expected


@pytest.mark.parametrize("name", ["adaponder", "ponder2"])
def test_slots_of_one_trip(name):
    """A recurrence that keeps slots, with a single trip, of which none are counted."""
    together, one_by_one = compared("vanilla", recurrence=name, recurrence_options={"trips": 1})
    assert together == one_by_one


def test_faults_in_rows_are_seen(monkeypatch):
    """With a fault planted in a slab's masks, in the columns of merged slots, or with padding read, rows are wrong."""
    with monkeypatch.context() as planted:
        planted.setattr(SlabBatch, "_mask", lambda self, positions: None)
        together, one_by_one = compared("depth_attention")
        assert together != one_by_one
    with monkeypatch.context() as planted:
        call = SlotBatch._call
        planted.setattr(SlotBatch, "_call", lambda self, *given, mask=None: call(self, *given))
        together, one_by_one = compared("adaponder")
        assert together != one_by_one
    monkeypatch.setattr(slot_table.SlotTable, "_end_at", lambda self, columns: None)
    with contextlib.suppress(IndexError, RuntimeError):
        together, one_by_one = compared("latent_cot")
        assert together != one_by_one


@pytest.mark.slow
def test_rows_that_halt_cost_nothing():
    """Of a batch, a layer computes as many tokens as it computes of each row alone, prompts of one length read at once
    among them."""
    model, chance = build(config_of("adaponder")), random.Random(5)
    cases = [([chance.randrange(3, 61) for _ in range(14)], 8) for _ in range(5)]
    seen = []
    layer = model.model.layers[1].mlp
    layer.register_forward_hook(lambda module, given, out: seen.append(out.shape[0] * out.shape[1]))

    def computed(some):
        seen.clear()
        run(model, some, seed=2)
        return sum(seen)

    whole = computed(cases)
    assert whole == sum(computed([one]) for one in cases)
    assert whole < 3 * sum(len(prompt) + new - 1 for prompt, new in cases), "and some do halt early"


SHOWN = {
    "once": ("vanilla", {}),
    "loop": ("loop", {}),
    "loop, `kv: first`": ("loop", {"kv": "first"}),
    "ponder": ("ponder", {}),
    "ponder, view duo or all": ("ponder", {"view": "duo"}),
    "ponder2": ("ponder2", {}),
    "ponder3": ("ponder3", {}),
    "adaponder": ("adaponder", {}),
    "latent_cot": ("latent_cot", {}),
}
KIND = {SlabBatch: "slabs", SlotBatch: "slots", LoneBatch: "one by one"}


def table():
    """Which engine runs which recurrence, as docs/how-to/vllm.md has it."""
    rows = ["| recurrence | `fathom serve` | `generate_batch` | vLLM, with the plugin |", "| --- | --- | --- | --- |"]
    for words, (name, options) in SHOWN.items():
        model = FathomForCausalLM(FathomConfig(**{**SHAPE, **parse_mechanism(name), "recurrence_options": options}))
        decoder, said = model.model, []
        for engine in ("cache", "attention_instances"):
            held = dict.fromkeys(range(sum(map(len, decoder.plan))))  # a bank for every visit
            try:
                check_engine(model.config, decoder.recurrence, decoder.plan, {engine: held})
                said.append("yes")
            except ValueError:
                said.append("refused")
        code = words.replace(words.split(",")[0], f"`{words.split(',')[0]}`", 1)
        rows.append(f"| {code} | {KIND[type(batch_for(model))]} | {said[0]} | {said[1]} |")
    assert {words.split(",")[0] for words in SHOWN} == {one.name for one in ALL if one.axis == "recurrence"}
    return "\n".join(rows)


def test_the_page_says_which_engine_runs_which_recurrence():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md").read_text(encoding="utf-8")
    assert table() in page, f"docs/how-to/vllm.md should say\n{table()}"


# The engine.


@pytest.fixture
def engine():
    made = []

    def make(case="loop+depth_attention", budget=BUDGET, draft_trips=None, lookup=False, **shape):
        model = build(config_of(case, **shape))
        made.append(Engine(model, budget, draft_trips=draft_trips, lookup=lookup))
        return made[-1], model

    yield make
    for one in made:
        one.join(10)
        assert not one._thread.is_alive()


def drawn(running, prompts, temperature):
    """Texts by (seed, prompt), asked for at once."""
    jobs = [Collected(prompt, 10, Choice(temperature, seed=seed)) for seed, prompt in prompts]
    submitted_at_once(running, jobs)
    assert [one.wait() for one in jobs] == ["length"] * len(jobs)
    return [one.tokens for one in jobs]


@pytest.mark.quick("loop+depth_attention")
@pytest.mark.parametrize("case", ["loop+depth_attention", "adaponder"])
def test_draws_do_not_depend_on_company(engine, case):
    running, _ = engine(case)
    prompts = list(enumerate(prompts_of(random.Random(0), 6)))
    apart = [drawn(running, [pair], 1.0)[0] for pair in prompts]
    assert drawn(running, prompts, 1.0) == apart


def test_greedy_texts_of_an_engine(engine):
    """Requests with budgets of trips of their own, long prompts in chunks, an end token."""
    running, model = engine()
    chance = random.Random(1)
    prompts = [*prompts_of(chance, 4), [chance.randrange(3, 61) for _ in range(90)]]
    jobs = [Collected(prompt, 12, Choice(), trips=1 + i % 2) for i, prompt in enumerate(prompts)]
    running.submit([one.job for one in jobs])
    for i, one in enumerate(jobs):
        assert one.wait() == "length" and one.tokens == alone(model, prompts[i], 12, max_trips=1 + i % 2)
    end = jobs[0].tokens[4]
    stopped = Collected(prompts[0], 12, Choice(), trips=1, stops=frozenset([end]))
    running.submit([stopped.job])
    assert stopped.wait() == "stop" and stopped.tokens == jobs[0].tokens[: jobs[0].tokens.index(end) + 1]
    assert running.cache_bytes >= 0 and running.counts["finished"] == 6


@pytest.mark.parametrize(("case", "kind"), [("loop+depth_attention", SlabBatch), ("adaponder", SlotBatch)])
def test_short_prompts_are_read_at_once(engine, monkeypatch, case, kind):
    """Those of about one length, with one budget of trips, up to a chunk's tokens; others one after another."""
    running, model = engine(case)
    sizes, several, one = [20, 20, 20, 3, 3, 30, 30], [], []
    whole, chunk = kind.read_several, kind.read
    monkeypatch.setattr(
        kind, "read_several", lambda self, prompts: several.append(list(map(len, prompts))) or whole(self, prompts)
    )
    monkeypatch.setattr(kind, "read", lambda self, ids, **how: one.append(len(ids)) or chunk(self, ids, **how))
    monkeypatch.setattr("fathom.inference.engine.chunk", lambda seconds: 82)  # 16 more for each pass
    chance = random.Random(2)
    prompts = [[chance.randrange(3, 61) for _ in range(size)] for size in sizes]
    jobs = [Collected(p, 5, Choice(), trips=1 if len(p) == 3 else None) for p in prompts]
    jobs[2].job.new_tokens = 0
    submitted_at_once(running, jobs)
    assert [job.wait() for job in jobs] == ["length"] * 7
    assert several == [[3, 3], [20, 20, 20], [30, 30]] and not one
    for job, prompt in zip(jobs, prompts, strict=True):
        assert job.tokens == alone(model, prompt, 5, max_trips=job.job.trips)[: job.job.new_tokens]
    scored = [Collected(p, 5, Choice(), score_prompt=i == 1, logprobs=0) for i, p in enumerate(prompts[:3])]
    submitted_at_once(running, scored)
    assert [job.wait() for job in scored] == ["length"] * 3
    assert len(several) == 3 and one == [20, 20, 20], "a prompt that is scored is read alone"


def watched(running, model):
    """Bytes that keys and values of all batches really take in every forward pass; the list grows as it runs."""
    held = []

    def look(*given):
        batches_ = [lane.batch for lane in running.lanes.values()]
        caches = [getattr(batch, name, None) for batch in batches_ for name in ("cache", "fresh")]
        layers = [layer for cache in caches if cache is not None for layer in cache.layers]
        stored = [x.untyped_storage() for layer in layers for x in (layer.keys, layer.values) if x is not None]
        held.append(sum({one.data_ptr(): one.nbytes() for one in stored}.values()))

    model.model.register_forward_hook(look)
    return held


def never_halting(model):
    """Rows are then as long as they may become."""
    for gate in getattr(model.model.recurrence, "gates", ()):
        torch.nn.init.constant_(gate.down.bias, 20.0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", ["loop", "adaponder"])
def test_a_long_text_leaves_its_room_to_others(engine, monkeypatch, case):
    """Though some are always there: the batch' rows were as long as its longest had been until all had ended. And the
    memory is free before others take it, which it is not if what they leave is kept."""
    monkeypatch.setattr("fathom.inference.engine.GRAIN", 16)
    budget = batches.token_bytes(build(config_of(case, **TWO)), None) * 128  # two rows of the long one, eight of others
    chance = random.Random(5)
    prompts = [[chance.randrange(3, 61) for _ in range(4)] for _ in range(18)]

    def served():
        running, model = engine(case, budget=budget, **TWO)
        held, rows, step = watched(running, never_halting(model)), [], running._step
        monkeypatch.setattr(running, "_step", lambda lane: rows.append((len(lane.jobs), lane.rectangle)) or step(lane))
        jobs = [Collected(p, 60 if i == 0 else 8 + i % 5, Choice()) for i, p in enumerate(prompts)]
        submitted_at_once(running, jobs)
        assert [one.wait() for one in jobs] == ["length"] * 18
        return model, jobs, rows, max(held)

    model, jobs, rows, most_held = served()
    assert [j.tokens for j in jobs] == [alone(model, p, len(j.tokens)) for p, j in zip(prompts, jobs, strict=True)]
    assert max(most for most, _ in rows[:50]) == 2 and max(most for most, _ in rows) == 8
    assert all(most <= held and held * tokens <= 128 for most, (held, tokens) in rows)
    assert 0.8 * budget < most_held <= budget
    if case == "adaponder":
        monkeypatch.setattr(SlotBatch, "reserve", lambda self, rows, tokens: None)
        assert served()[-1] > budget


@pytest.mark.slow
@pytest.mark.parametrize("case", ["loop", "adaponder"])
def test_a_long_text_leaves_its_room_to_other_trips(engine, monkeypatch, case):
    """Though some of its own trips are always there: those of others had no room beside them until all had ended."""
    monkeypatch.setattr("fathom.inference.engine.GRAIN", 16)
    budget = batches.token_bytes(build(config_of(case, **TWO)), None) * 128
    chance, turns = random.Random(5), []
    running, model = engine(case, budget=budget, **TWO)
    held, step = watched(running, never_halting(model)), running._step
    monkeypatch.setattr(running, "_step", lambda lane: turns.append(len(running.lanes)) or step(lane))
    prompts = [[chance.randrange(3, 61) for _ in range(4)] for _ in range(16)]
    sizes = [60, *[5 + i % 5 for i in range(1, 13)], 60, 12, 12]  # the second long one waits for the first, not for all
    jobs = [
        Collected(p, size, Choice(), trips=2 if i < 13 else None)
        for i, (p, size) in enumerate(zip(prompts, sizes, strict=True))
    ]
    submitted_at_once(running, jobs)
    assert [one.wait() for one in jobs] == ["length"] * 16
    for one, prompt in zip(jobs, prompts, strict=True):
        assert one.tokens == alone(model, prompt, len(one.tokens), max_trips=one.job.trips)
    assert 2 in turns and max(held) <= budget


def test_the_likeliest_tokens_do_not_depend_on_company(engine, monkeypatch):
    """Of equally likely ones, as half precision makes them, others are taken where more are asked for."""
    running, model = engine("vanilla")
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: head(hidden).round())
    prompts, counts = prompts_of(random.Random(7), 4), (3, 20, 5, None)

    def tops(some):
        jobs = [Collected(prompts[i], 8, Choice(), logprobs=counts[i]) for i in some]
        submitted_at_once(running, jobs)
        assert [one.wait() for one in jobs] == ["length"] * len(jobs)
        return [[event.top for event in one.events if hasattr(event, "top")] for one in jobs]

    together = tops(range(4))
    assert together == [tops([i])[0] for i in range(4)]
    assert [len(row[0]) for row in together] == [3, 20, 5, 0]


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        ("ponder2", {"draft_trips": 1}, "recurrence=ponder2 cannot be computed by themselves"),
        ("loop", {"draft_trips": 0}, "between 1 and 2"),
        ("loop", {"draft_trips": 1, "policy": Policy("sinks", 16, 2, 0.5)}, "which a cache of constant size cannot"),
    ],
)
def test_what_cannot_be_drafted_is_refused_at_once(case, settings, words):
    with pytest.raises(ValueError, match=words):
        Engine(build(config_of(case)), BUDGET, **settings)


def submitted_at_once(running, jobs):
    """All of them wait when the engine's next turn begins."""
    held = threading.Event()
    running.call(lambda: held.wait(60))
    running.submit([job.job for job in jobs])
    held.set()


def test_texts_of_one_request_do_not_keep_others_out(engine, monkeypatch):
    """A request of several texts is refused where they fill the queue; those of a single text are still taken."""
    monkeypatch.setattr("fathom.inference.engine.WAITING", 4)
    running, _ = engine(**TWO)
    held, request = threading.Event(), object()
    running.call(lambda: held.wait(60))
    many = [Collected([5 + i], 2, Choice(), request=request) for i in range(4)]
    running.submit([one.job for one in many])
    with pytest.raises(RequestError, match="4 sequences are already waiting"):
        running.submit([Collected([5], 2, Choice(), request=held).job for _ in range(2)])
    singles = [Collected([7 + i], 2, Choice(), request=object()) for i in range(3)]
    for one in singles:
        assert running.ready
        running.submit([one.job])
    assert not running.ready
    with pytest.raises(RequestError, match="4 sequences are already waiting"):
        running.submit([Collected([5], 2, Choice()).job])
    held.set()
    assert [one.wait() for one in [*many, *singles]] == ["length"] * 7


def test_what_an_engine_refuses(engine, monkeypatch):
    monkeypatch.setattr("fathom.inference.engine.WAITING", 3)
    budget = batches.token_bytes(build(config_of("loop+depth_attention", **TWO)), None) * 512
    running, model = engine(budget=budget, **TWO)
    with pytest.raises(RequestError, match=r"for its 600 tokens; the server has .* MiB .`cache_memory`"):
        running.submit([Collected([5], 599, Choice()).job])
    with pytest.raises(RequestError, match="already waiting"):
        running.submit([Collected([5], 2, Choice()).job for _ in range(4)])
    many = [Collected([5 + i], 30, Choice()) for i in range(4)]  # two have room at a time
    most = 0
    for half in (many[:3], many[3:]):
        running.submit([one.job for one in half])
        while not all(one.done.is_set() for one in half):
            most = max(most, running.cache_bytes)
            time.sleep(0.001)
    assert 0 < most <= running.budget
    assert [one.tokens for one in many] == [alone(model, [5 + i], 30) for i in range(4)]


def test_giving_up_and_failing(engine, monkeypatch):
    running, _ = engine()
    endless, waits = Collected([5, 6], 10_000, Choice()), Collected([7], 3, Choice())
    running.submit([endless.job])
    while len(endless.tokens) < 3:
        time.sleep(0.001)
    running.cancel([endless.job])
    running.submit([waits.job])
    assert waits.wait() == "length" and not endless.done.is_set() and running.counts["cancelled"] == 1
    assert running.call(lambda: 7).result(10) == 7
    with pytest.raises(ZeroDivisionError):
        running.call(lambda: 1 / 0).result(10)
    for name in ("step", "read", "join", "reserve"):
        with monkeypatch.context() as planted:
            planted.setattr(SlabBatch, name, lambda self, *given, **more: 1 / 0)
            failed = Collected([5, 6], 4, Choice())
            running.submit([failed.job])
            assert "ZeroDivisionError" in str(failed.wait())
    after = Collected([7], 3, Choice())
    running.submit([after.job])
    assert after.wait() == "length" and after.tokens == waits.tokens
    endless = Collected([5, 6], 10_000, Choice())
    running.submit([endless.job])
    running.close()
    assert "shutting down" in str(endless.wait())


@pytest.mark.parametrize("new, ends", [(0, "length"), (4, "not finite")])
def test_no_token_is_drawn_from_no_numbers(engine, new, ends):
    """Drawing raised an error, which ended the others that were read with it too."""
    running, model = engine("loop+depth_attention", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = torch.nan
    bad, good = Collected([60, 8, 9], new, Choice(1.0, top_p=0.9)), Collected([7, 8, 10], 6, Choice())
    submitted_at_once(running, [bad, good])
    assert ends in str(bad.wait()) and bad.tokens == []
    assert good.wait() == "length" and good.tokens == alone(model, [7, 8, 10], 6)


@pytest.mark.quick("loop+depth_attention")
@pytest.mark.parametrize("case", ["loop+depth_attention", "ponder3"])
def test_a_text_of_no_numbers_ends_alone(engine, monkeypatch, case):
    monkeypatch.setattr("fathom.inference.engine.in_order", lambda jobs, first=False: list(jobs))
    running, model = engine(case, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = torch.nan
    long, bad, short = [*range(12, 40)], [*range(10, 30), 60, 8, 9], [7, 8]  # the third takes the second's row

    def made():
        jobs = [Collected(long, 9, Choice()), Collected(bad, 4, Choice(1.0)), Collected(short, 6, Choice())]
        submitted_at_once(running, jobs)
        assert "not finite" in str(jobs[1].wait()) and jobs[1].tokens == []
        return [(one.wait(), one.tokens) for one in (jobs[0], jobs[2])]

    whole = [("length", alone(model, long, 9)), ("length", alone(model, short, 6))]
    assert made() == whole and running.counts["failed"] == 1
    scored = Collected(bad, 0, Choice(), score_prompt=True, logprobs=1)
    running.submit([scored.job])
    assert "not finite" in str(scored.wait()) and len(scored.events) == 1
    for gone in (Collected(bad, 0, Choice()), Collected(bad * 40, 4, Choice())):  # ends without a token; is given up
        long_one = Collected(long, 400, Choice())
        running.submit([long_one.job])
        running.submit([gone.job])
        while not (gone.events or gone.job.read):
            time.sleep(0.001)
        running.cancel([gone.job])
        after = Collected(short, 6, Choice())
        running.submit([after.job])
        assert after.wait() == "length" and after.tokens == whole[1][1]
        running.cancel([long_one.job])
    if case == "loop+depth_attention":  # slots leave with their row
        monkeypatch.setattr(SlabLayer, "wipe", lambda *given: None)
        assert made() != whole


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vanilla", "loop+depth_attention-grid", "ponder-hidden-duo"])
def test_padding_of_no_numbers_leaves_with_its_row(engine, monkeypatch, case):
    """A short prompt of several that are read at once is padded behind with its last token, here the damaged one."""
    monkeypatch.setattr("fathom.inference.engine.in_order", lambda jobs, first=False: list(jobs))
    monkeypatch.setattr("fathom.inference.engine.chunk", lambda seconds: 512)
    running, model = engine(case, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[60], model.lm_head.weight[60] = torch.nan, 0
    long, bad, short = [[*range(3, 50)], [*range(4, 51)]], [*range(10, 34), 60], [7, 8]

    def made(new):
        jobs = [*(Collected(one, 30, Choice()) for one in long), Collected(bad, new, Choice())]
        submitted_at_once(running, jobs)
        while not jobs[2].events:
            time.sleep(0.001)
        jobs[2:] = [Collected(short, 6, Choice())]  # takes the row of the one that has left
        running.submit([jobs[2].job])
        return [(one.wait(), one.tokens) for one in jobs]

    whole = [("length", alone(model, one, new)) for one, new in zip([*long, short], (30, 30, 6), strict=True)]
    assert made(4) == whole and made(0) == whole
    if case != "ponder-hidden-duo":  # there padding is never stored
        monkeypatch.setattr(SlabLayer, "blank", lambda *given: None)
        assert made(4) != whole


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's count of pages")
def test_room_that_no_text_fills_takes_no_memory(monkeypatch):
    """Neither at first nor when a slab grows, and what the sequences hold is kept; zeros that are written take all."""
    model = build(config_of("vanilla"))

    def taken():
        batch, before = batch_for(model), resident()
        batch.reserve(1, 64)
        batch.read([5, 6, 7])
        batch.join()
        batch.reserve(64, (128 << 20) // (64 * token_bytes(model, None)))
        logits = batch.step([8])
        return resident() - before, logits

    little, logits = taken()
    assert little < 32 << 20
    monkeypatch.setattr("fathom.inference.batches.untouched", lambda shape, like: torch.full(shape, 0.0))
    much, same = taken()
    assert much > 96 << 20 and torch.equal(logits, same)


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("case", ["vanilla", "ponder-hidden-duo", "latent_cot"])
def test_padding_is_a_prompts_own(case):
    """Token 0, whose embedding is damaged, is in none of the prompts."""
    model, prompts = build(config_of(case, tie_word_embeddings=False)), [[7, 8], [9, 8, 5]]
    with torch.no_grad():
        model.get_input_embeddings().weight[0], model.lm_head.weight[0] = torch.nan, 0
        batch = batch_for(model)
        batch.reserve(2, 8)
        assert batch.read_several(prompts).isfinite().all()


def test_a_draft_of_no_numbers_ends_alone(engine):
    running, model = engine("loop+depth_attention", draft_trips=1, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    for temperature in (0.0, 1.0):
        failed = Collected([5, 6], 4, Choice(temperature))
        running.submit([failed.job])
        assert "not finite" in str(failed.wait())


@pytest.mark.parametrize("place", ["_make_room", "_found", "_leave", "hand_out"])
def test_a_fault_that_concerns_some_ends_only_those(engine, monkeypatch, place):
    """Where jobs are admitted, removed and heard; the thread goes on."""
    running, _ = engine()
    running.prefixes.budget = 1 << 20
    endless = Collected([5, 6], 10_000, Choice())
    if place == "_leave":
        running.submit([endless.job])
        while not endless.events:
            time.sleep(0.001)
    with monkeypatch.context() as planted:
        broken, whole = threading.Event(), getattr(running, place)

        def fail(*given):
            broken.set()
            raise MemoryError

        planted.setattr(running, place, fail)
        if place == "_leave":
            running.cancel([endless.job])
        else:
            running.submit([endless.job, Collected([5, 6], 3, Choice()).job])
        assert broken.wait(60)
        running.call(lambda: setattr(running, place, whole)).result(60)
    if place in ("_make_room", "_found"):
        assert "generation failed: MemoryError" in str(endless.wait())
    running.cancel([endless.job])
    after = Collected([7], 3, Choice())
    running.submit([after.job])
    assert after.wait() == "length" and running.alive


def test_a_fault_of_the_engine_keeps_nobody_waiting(engine, monkeypatch):
    running, _ = engine()
    monkeypatch.setattr(running, "_choose", lambda spent: 1 / 0)
    first = Collected([5, 6], 4, Choice())
    assert running.alive and running.ready
    running.submit([first.job])
    assert "the engine failed: ZeroDivisionError" in str(first.wait())
    running._thread.join(10)
    assert not running.alive and not running.ready
    with pytest.raises(RequestError, match="the engine failed"):
        running.submit([Collected([5, 6], 4, Choice()).job])


# Draws.


def test_a_checkpoints_own_settings():
    """Whole numbers where others are meant, or the other way round, and limits that are 0."""
    own = GenerationConfig(do_sample=True, top_k=50.0, repetition_penalty=2, top_p=0.0, temperature=0.0)
    choice = Choice.of({}, own)
    assert (choice.top_k, choice.repetition_penalty, choice.top_p, choice.temperature) == (50, 2.0, 0.0, 0.0)
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert Choice.of({"temperature": 1.0}, own).token(logits, [0], [1]) == 2
    assert Choice.of({}, GenerationConfig(do_sample=True)) == Choice(1.0)
    assert Choice.of({}, GenerationConfig(temperature=0.3)) == Choice(0.0)
    greedy = GenerationConfig(do_sample=False, temperature=0.0)
    assert Choice.of({}, greedy) == Choice(0.0) and Choice.of({"top_p": 0.9}, greedy) == Choice(1.0, top_p=0.9)


@pytest.mark.parametrize("sharp", [0.0, 0.01, 1.0, 5.0, 40.0])
def test_limits_are_those_of_transformers(sharp):
    """Flat and peaked distributions, every limit alone and all at once; no vocabulary is sorted for them."""
    draws = torch.Generator().manual_seed(int(sharp))
    logits = torch.randn(5003, generator=draws, dtype=torch.float64) * sharp + torch.arange(5003) * 1e-9
    limits = {"top_k": (TopKLogitsWarper, (1, 40, 9999)), "top_p": (TopPLogitsWarper, (1e-9, 0.3, 0.95, 1 - 1e-9))}
    limits["min_p"] = (MinPLogitsWarper, (0.02, 1.0))
    asked = [{name: value} for name, (_, values) in limits.items() for value in values]
    for one in [*asked, {"top_k": 700, "top_p": 0.8, "min_p": 0.01}]:
        theirs = LogitsProcessorList([limits[name][0](value) for name, value in one.items()])
        expected = theirs(torch.zeros(1, 1, dtype=torch.long), logits[None] / 0.7)[0].softmax(-1)
        torch.testing.assert_close(Choice(0.7, **one).probabilities(logits), expected, rtol=1e-6, atol=0)


def test_equal_tokens_are_in_a_nucleus_or_out_of_it_together():
    """Which of them a sort would keep is the sort's choice."""
    made = Choice(1.0, top_p=0.5).probabilities(torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0]).double())
    assert [p > 0 for p in made.tolist()] == [True, True, True, True, False]


def test_penalties_and_their_limits():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert Choice(1.0).probabilities(logits).all()
    both = Choice(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 2.0}).scores(logits, [0], [1, 1, 2])
    assert both.tolist() == [1.0, 3.0 - 0.5 - 0.5, 2.0 - 0.75, 2.0]
    repeated = Choice(repetition_penalty=2.0).scores(torch.tensor([1.0, -1.0, 2.0]), [0], [1])
    assert repeated.tolist() == [0.5, -2.0, 2.0]
    ((_, likely),) = sampling.likeliest(torch.tensor([[0.0, -torch.inf]]), [1], 2)
    assert likely == [(0, 0.0), (1, -9999.0)]  # JSON has no infinite numbers
    assert Choice(1e-300, seed=3).token(logits, [], []) == 1
    assert Choice(1.0, repetition_penalty=1e-320).token(logits, [2], []) == 2, "though it overflows"
    assert Choice().plain and not Choice(frequency_penalty=0.1).plain


@pytest.mark.quick("latent_cot", "vanilla")
@pytest.mark.parametrize("case", ["adaponder+depth_attention", "latent_cot", "loop-middle", "vanilla"])
def test_the_iterations_behind_each_token(case):
    """In company as alone, and in all as many as the forward passes say."""
    model, chance = build(config_of(case)), random.Random(case)
    prompts = prompts_of(chance, 4)
    noted = []
    with counting(model) as made:
        for prompt in prompts:
            tokens = alone(model, prompt, 8)
            trips = [int(one.expand(1, -1)[0, -1] if one.dim() > 1 else one) for one in made]
            noted.append(trips or [None] * len(tokens))
            made.clear()
    engine = Engine(model, BUDGET)
    collected = [Collected(prompt, 8, Choice(), tell_trips=True) for prompt in prompts]
    silent = Collected(prompts[0], 8, Choice())
    engine.submit([one.job for one in (*collected, silent)])
    for one in (*collected, silent):
        one.wait()
    engine.join(10)
    assert [[event.trips for event in one.events[:-1]] for one in collected] == noted
    assert [event.trips for event in silent.events[:-1]] == noted[0], "asked or not"
