"""Engines with a cache of their own: exact where a visit can have a bank, refused where slots are needed."""

import importlib.util
import random
import sys
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.generation.continuous_batching import cache as paged
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fathom.checkpoints.export import export
from fathom.models import FathomConfig, FathomModel, modeling
from fathom.models.registry import parse_mechanism
from fathom.models.trips.engines import check_engine, handed

from .cases import SHAPE, build, config_of, tokens
from .hosts.cases import ours_of, theirs_of

SLOTTED = ["ponder-hidden-duo", "ponder-all", "ponder2", "ponder3", "adaponder", "latent_cot"]
"""One of each reason to refuse: views other than SAME, and halting."""
SEATED = ["vanilla", "depth_attention", "loop", "loop-middle", "loop+depth_attention-grid", "ponder"]
PROMPTS = [[5, 9, 31, 7], [44, 3, 17, 8, 12, 29, 6]]
MIXERS = ["", "+depth_attention", "+uniform_depth", "+value_residual"]
RESIDUALS = ["", "+denseformer", "+attention_residuals", "+hyper_connections"]


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Without psutil transformers takes a CPU to have no memory, and older releases then refuse any cache."""
    if importlib.util.find_spec("psutil") is None:
        known = torch.device("cpu"), 1 << 34, 0, 0
        monkeypatch.setattr(paged, "get_device_and_memory_breakdown", lambda: known)


def batched(model, prompts=PROMPTS, new=8, **pages) -> list[list[int]]:
    """Greedy tokens of transformers' continuous batching, in the order of the prompts."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # A few pages: by default the cache takes all free memory, which the tests poison number by number.
    pages = ContinuousBatchingConfig(**{"num_blocks": 8, "max_batch_tokens": 64, **pages})
    found = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=pages, progress_bar=False
    )
    assert [output.error for output in found.values()] == [None] * len(prompts)
    ordered = sorted(found.values(), key=lambda o: int(o.request_id.split("_")[-1]))
    return [output.generated_tokens for output in ordered]


def one_by_one(model, prompts=PROMPTS, new=8, **arguments) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    outputs = [
        model.generate(torch.tensor([p]), max_new_tokens=new, do_sample=False, **arguments)[0, len(p) :]
        for p in prompts
    ]
    return [output.tolist() for output in outputs]


@pytest.mark.quick("vanilla", "loop+depth_attention-grid")
@pytest.mark.parametrize("case", SEATED)
def test_batched_exactly(case):
    model = build(config_of(case))
    assert batched(model) == one_by_one(model)


def drawn(seed: int):
    """A mechanism with everything that changes how the engine meets it."""
    chance = random.Random(seed)
    recurrence = chance.choice(["vanilla", "loop", "loop", "loop", "ponder", "ponder"])
    name = recurrence + chance.choice(MIXERS) + chance.choice(RESIDUALS)
    options: dict[str, dict] = {}
    if recurrence == "loop":
        kept = {"prelude": chance.randint(0, 1), "coda": chance.randint(0, 1)}
        options["recurrence_options"] = {"trips": chance.randint(1, 4), **kept}
    elif recurrence == "ponder":
        options["recurrence_options"] = {
            "trips": chance.randint(2, 3),
            "top_k": chance.choice([0, 7]),
            "feed": chance.choice(["mixture", "hidden"]),
        }
    if "depth_attention" in name and recurrence != "vanilla":
        options["mixer_options"] = {"across_trips": chance.choice(["none", "same_layer", "grid"]), "stride": 2}
    shape: dict[str, object] = {"num_hidden_layers": chance.randint(3, 4)}
    if chance.random() < 0.25:
        kinds = ["full_attention", "sliding_attention"] * 2
        shape |= {"layer_types": kinds[: shape["num_hidden_layers"]], "use_sliding_window": True, "sliding_window": 5}
    model = build(FathomConfig(**{**SHAPE, **parse_mechanism(name), **options, **shape}), seed)
    common = [chance.randrange(3, 61) for _ in range(chance.choice([0, 0, 9, 18]))]  # which pages may share
    prompts = [
        [*common, *(chance.randrange(3, 61) for _ in range(chance.randint(1, 25)))] for _ in range(chance.randint(1, 5))
    ]
    pages = {
        "page_size": chance.choice([4, 8, 16]),
        "max_batch_tokens": chance.choice([7, 16, 64]),  # few: a prompt goes in by chunks
        "num_blocks": chance.choice([16, 24, 64]),  # few: a request is put off and read again
    }
    return name, model, prompts, chance.randint(1, 14), pages


@pytest.mark.quick("1", "2")
@pytest.mark.parametrize("seed", range(200))
def test_random_cases_are_batched_exactly(seed):
    name, model, prompts, new, pages = drawn(seed)
    assert batched(model, prompts, new, **pages) == one_by_one(model, prompts, new), (name, pages)


@pytest.mark.slow
def test_draws_have_the_distribution():
    """Two tokens over a vocabulary of seven, 750 requests: chi-square against the model's own probabilities."""
    model = build(FathomConfig(**{**SHAPE, "vocab_size": 7, "recurrence": "loop"}))
    prompt, count = [5, 3, 6], 750
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        after = [model(torch.tensor([[*prompt, t]])).logits[0, -1].double().softmax(-1) for t in range(7)]
    joint = torch.stack([first[t] * after[t] for t in range(7)]).flatten()
    config = GenerationConfig(max_new_tokens=2, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=512, page_size=8, max_batch_tokens=512, seed=0)
    found = model.generate_batch([prompt] * count, config, pages, progress_bar=False)
    counts = torch.zeros(49, dtype=torch.long)
    for output in found.values():
        counts[output.generated_tokens[0] * 7 + output.generated_tokens[1]] += 1
    large = joint * count > 5
    expected = torch.cat((joint[large], joint[~large].sum()[None])) * count
    seen = torch.cat((counts[large], counts[~large].sum()[None]))
    assert len(found) == count and scipy.stats.chisquare(seen, expected * count / expected.sum()).pvalue > 1e-3
    uniform = torch.full_like(expected, count / len(expected))
    assert scipy.stats.chisquare(seen, uniform).pvalue < 1e-6, "and not anything"


@pytest.mark.parametrize("case", SLOTTED)
def test_slots_are_refused_before_the_first_request(case):
    with pytest.raises(ValueError, match=rf"passes cache= .* {case.split('-')[0]} needs slots: .*`fathom serve`"):
        batched(build(config_of(case)))


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("phi", marks=pytest.mark.slow)])
def test_hosted_families_are_batched_exactly(family):
    """A loop of a family's layers: each visit in a bank of its own."""
    model = ours_of(theirs_of(family), recurrence="loop", recurrence_options={"trips": 2}).eval()
    assert batched(model) == one_by_one(model)


def test_layers_without_keys_are_not_batched():
    with pytest.raises(ValueError, match="continuous batching: lfm2 has layers without a key and value"):
        ours_of(theirs_of("lfm2")).init_continuous_batching()


def test_the_seat_is_needed(monkeypatch):
    """Without it, the fault: other tokens, and no error."""
    model = build(config_of("loop"))
    monkeypatch.setattr(modeling, "seat", lambda attention, *args: attention)
    first = model.config.num_hidden_layers  # the same for later versions, where the model stores
    monkeypatch.setattr(modeling, "handed", lambda key, value, bank, given: handed(key, value, bank % first, given))
    assert batched(model) != one_by_one(model)


def test_a_budget_of_trips(monkeypatch):
    model = build(config_of("loop"))
    model.config.max_trips = 2
    fewer = one_by_one(model)
    assert batched(model) == fewer
    model.config.max_trips = None
    assert one_by_one(model, max_trips=2) == fewer != one_by_one(model)
    with pytest.raises(ValueError, match="max_trips must be between 1 and 3"):
        config_of("loop", max_trips=4)


def test_a_manager_that_is_kept():
    """It is found again, knows what has changed since, and goes when told."""
    model, kept = build(config_of("loop")), {"persistent_manager": True, "progress_bar": False}
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    for _ in range(2):
        found = model.generate_batch(PROMPTS, config, pages, **kept)
        assert [found[name].generated_tokens for name in sorted(found)] == one_by_one(model, new=4)
    first = model.init_continuous_batching(config, pages)
    assert model.init_continuous_batching(config, pages) is first
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching(config, pages) is not first


@pytest.mark.parametrize("backend,argument", [("sdpa", "cache"), ("sglang", "attention_instances"), ("vllm", None)])
def test_foreign_caches_without_banks_are_refused(monkeypatch, backend, argument):
    """Also the backbone alone, which is what vLLM and SGLang open."""
    called = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, backend, lambda *args, **kwargs: called.append(args))
    model = FathomModel(config_of("loop")).eval()
    model.config._attn_implementation = backend
    cache = dict.fromkeys(range(4)) if argument == "attention_instances" else object()
    with pytest.raises(
        ValueError, match=f"{argument or backend}.* loop makes 3 trips, .* 12 .*an export with form='unrolled'"
    ):
        model(tokens(1, 4), **({argument: cache} if argument else {}))
    assert not called


@pytest.mark.parametrize("installed,stored", [("cache", [7]), ("past_key_values", [])])
def test_who_stores_what_an_engine_batches(installed, stored):
    """The model from 5.24 on, in the visit's bank; before it the attention function, which finds the cache."""
    seen = []
    paged = SimpleNamespace(update=lambda key, value, bank, kwargs: seen.append(bank) or (key + 1, value + 1))
    given, x = {"cache": paged, "block_table": None}, torch.zeros(1)
    keys, _ = handed(x, x, 7, given, installed)
    assert seen == stored and keys.item() == len(stored) and ("cache" in given) == (not stored)
    assert handed(x, x, 7, {}, installed) == (x, x)


@pytest.mark.parametrize("backend,argument", [("sdpa", "cache"), ("sglang", "attention_instances"), ("vllm", None)])
def test_shared_keys_are_refused(monkeypatch, backend, argument):
    """An engine would store what a later trip does not make; also one that has a bank for every visit."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, backend, lambda *args, **kwargs: None)
    config = config_of("loop", recurrence_options={"trips": 3, "kv": "first"})
    config._attn_implementation = backend
    given = {argument: dict.fromkeys(range(12))} if argument else {}
    with pytest.raises(ValueError, match=r"recurrence_options\.kv=first later trips make none"):
        FathomModel(config).eval()(tokens(1, 4), **given)
    with pytest.raises(ValueError, match=r"passes cache= .* with recurrence_options\.kv=first"):
        batched(build(config_of("loop-shared")))


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash_attention_2", "flex_attention", "fathom_kvcache"])
def test_backends_that_leave_the_cache_to_the_model(backend):
    model = FathomModel(config_of("loop"))
    model.config._attn_implementation = backend
    check_engine(model.config, model.recurrence, model.plan, {"position_ids": None})
    model.config._attn_implementation = "vllm"
    check_engine(model.config, model.recurrence, model.plan[:1], {"cache": None, "attention_instances": None})


def test_the_refusal_travels(tmp_path, monkeypatch):
    """The code of an export, at a backend by another name; Trainer's label smoothing knows its class too."""
    monkeypatch.delitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, FathomConfig.model_type)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another directory
    directory = str(export(build(config_of("loop")), tmp_path / "loop"))
    model = get_class_from_dynamic_module("modeling.FathomModel", directory)
    assert model.__module__.startswith("transformers_modules."), "not Fathom's own"
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FathomConfig.model_type] == "FathomForCausalLM"
    config = model.config_class.from_pretrained(directory)
    monkeypatch.setitem(AttentionInterface._global_mapping, "some_engine", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match="attn_implementation=some_engine is not known to keep a cache for each trip"):
        model._from_config(config, attn_implementation="some_engine")
