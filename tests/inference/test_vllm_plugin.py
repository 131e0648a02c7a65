"""What vLLM's transformers backend asks of a model, asked here without vLLM.

The rules are those of `vllm/model_executor/models/transformers` (base.py, fusers/attention.py, fusers/qkv.py) and
`registry.py`. A stand-in for its attention keeps keys and values per layer and request, as its paged cache does.
"""

import ast
import importlib.util
import inspect
import json
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.inference import vllm_plugin
from fathom.models import FathomForCausalLM, FathomModel
from fathom.models.modeling import Attention
from fathom.models.trips.engines import engine_config
from fathom.models.trips.slots import plan
from tests.tiny import export_tiny, tiny_config

SERVED = [
    {"mixer": "none"},
    {"mixer": "depth_attention"},
    {"mixer": "uniform_depth"},
    {"mixer": "value_residual"},
    {"mixer": "none", "residual": "denseformer"},
    {"mixer": "none", "residual": "attention_residuals"},
    {"mixer": "none", "residual": "hyper_connections"},
    {"mixer": "none", "residual": "mudd", "residual_options": {"ways": "r"}},
    {"mixer": "depth_attention", "residual": "hyper_connections"},
    {"recurrence": "loop", "mixer": "none"},
    {"recurrence": "loop", "mixer_options": {"across_trips": "grid", "stride": 2}},
    {"recurrence": "ponder", "recurrence_options": {"feed": "hidden"}},
    {
        "mixer": "depth_attention",
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
]


@pytest.fixture(autouse=True)
def registered():
    """The plugin's registrations, taken back afterwards."""
    vllm_plugin.register()
    vllm_plugin.register()
    yield
    vars(sys.modules["transformers"]).pop("FathomForCausalLM", None)


class Request:
    """One request: its tokens, and what the cache of each layer holds of it."""

    def __init__(self, ids):
        self.ids, self.done, self.cache = ids, 0, {}


class PagedAttention:
    """One layer's attention: knows its layer, the requests in this step and how many new tokens each has."""

    def __init__(self, layer, config):
        self.layer, self.config, self.calls = layer, config, 0
        sliding = config.layer_types[layer] == "sliding_attention"
        self.window = config.sliding_window if sliding else None

    def forward(self, query, key, value, step):
        """`[tokens, heads * head_dim]` of all requests one after another, as vLLM passes and returns them."""
        self.calls += 1
        d, outputs, at = self.config.head_dim, [], 0
        for request, count in step:
            q, k, v = (x[at : at + count].view(count, -1, d) for x in (query, key, value))
            if self.layer in request.cache:
                k, v = (torch.cat(pair) for pair in zip(request.cache[self.layer], (k, v), strict=True))
            request.cache[self.layer] = (k, v)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
            far = (torch.arange(count) + len(k) - count)[:, None] - torch.arange(len(k))
            hidden = (far < 0) if self.window is None else (far < 0) | (far >= self.window)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1))
            at += count
        return torch.cat(outputs)


def stand_in(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    """The shapes that vLLM's own function makes of ours: no batch dimension after it."""
    assert attention_mask is None, "vLLM masks by itself; a mask here was work for nothing"
    assert scaling == module.scaling
    assert {x.shape[0] for x in (query, key, value)} == {1}
    tokens = query.shape[-2]
    query, key, value = (x.transpose(1, 2).reshape(tokens, -1) for x in (query, key, value))
    return attention_instances[module.layer_idx].forward(query, key, value, stand_in.step), None


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", stand_in)


def build(**fields):
    """As `Base.__init__` does."""
    config = tiny_config(initializer_range=0.3, **fields)
    config._attn_implementation = "vllm"
    config.dtype = torch.float64
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float64, trust_remote_code=False).eval()
    told = engine_config(config, plan(config))  # a layer for every visit
    return model, {i: PagedAttention(i, told) for i in range(told.num_hidden_layers)}


def step(model, instances, work):
    """As `Base.forward` calls the model: all requests in one row, no mask, no cache, positions that restart."""
    stand_in.step = work
    ids = torch.cat([request.ids[request.done : request.done + count] for request, count in work])
    positions = torch.cat([torch.arange(request.done, request.done + count) for request, count in work])
    outputs = model(
        input_ids=ids[None],
        inputs_embeds=None,
        use_cache=False,
        position_ids=positions[None],
        attention_instances=instances,
        return_dict=False,
    )
    for request, count in work:
        request.done += count
    return outputs[0][0, ...].split([count for _, count in work])


@pytest.mark.quick("none", "depth_attention0", "none+hyper_connections", "loop", "ponder")
@pytest.mark.parametrize("fields", SERVED, ids=lambda f: "+".join(str(v) for v in f.values() if isinstance(v, str)))
def test_the_cache_is_the_only_state(backend, fields):
    """Chunked prefill and decoding of requests that share every call equal each request alone, all at once."""
    model, instances = build(**fields)
    one, two = Request(torch.randint(0, 384, (13,))), Request(torch.randint(0, 384, (9,)))
    got = {one: [], two: []}
    for work in [[(one, 6)], [(one, 3), (two, 5)], [(two, 2), (one, 1)], *[[(one, 1), (two, 1)]] * 2, [(one, 1)]]:
        for (request, _), hidden in zip(work, step(model, instances, work), strict=True):
            got[request].append(hidden)

    assert {instance.calls for instance in instances.values()} == {6}, "every layer attends once in a call"
    plain = FathomModel(tiny_config(**fields)).double().eval()
    plain.load_state_dict(model.state_dict())
    for request in (one, two):
        expected = plain(request.ids[None, : request.done]).last_hidden_state[0]
        torch.testing.assert_close(torch.cat(got[request]), expected, rtol=0, atol=1e-10)


@pytest.mark.slow
@torch.no_grad()
def test_one_graph(backend):
    """vLLM compiles the decoder with nothing but the number of tokens free."""
    model, instances = build()
    model.compile(fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 8):
        step(model, instances, [(Request(torch.randint(0, 384, (length,))), length)])
    assert {"input_ids", "inputs_embeds", "position_ids"} <= set(inspect.signature(type(model).forward).parameters)


def test_more_trips_need_more_banks(backend):
    """With a bank for each layer alone, a loop would overwrite its own cache without a word."""
    for mixer, advice in (("depth_attention", "`fathom serve`$"), ("none", "an export with form='unrolled'$")):
        model, instances = build(recurrence="loop", mixer=mixer)
        first = {i: instances[i] for i in range(4)}
        with pytest.raises(ValueError, match=f"loop makes 3 trips, which need 12 layers of cache and find 4.*{advice}"):
            step(model, first, [(Request(torch.tensor([5, 6])), 2)])
    with pytest.raises(ValueError, match="ponder2 needs slots: trips read other trips"):
        build(recurrence="ponder2")


@torch.no_grad()
def test_banks_are_those_of_a_budget(monkeypatch):
    """A vLLM that hangs its caches on modules finds one for each visit, and none that is not visited."""
    fields = {"recurrence": "loop", "recurrence_options": {"trips": 3, "prelude": 1, "coda": 1}, "max_trips": 2}

    def hung(module, *given, **kwargs):
        return stand_in(module, *given, **{**kwargs, "attention_instances": {module.layer_idx: module.attn}})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", hung)
    model, instances = build(**fields)
    banks = {number: bank for one in model._attentions() for number, bank in one.banks.items()}
    assert sorted(banks) == list(range(6))
    for number, bank in banks.items():
        vars(bank)["attn"] = instances[number]
    request = Request(torch.randint(0, 384, (5,)))
    stand_in.step = [(request, 5)]
    positions = torch.arange(5)[None]
    found = model(request.ids[None], position_ids=positions, use_cache=False).last_hidden_state
    plain = FathomModel(tiny_config(**fields)).double().eval()
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if not name.startswith("banks.")})
    torch.testing.assert_close(found, plain(request.ids[None]).last_hidden_state, rtol=0, atol=1e-10)


def test_a_pipeline_stage_fails_aloud(backend):
    """Sources and residual state do not travel between stages: a dropped layer must be an error, not another model."""

    class Missing(nn.Identity):
        def forward(self, state, **kwargs):  # vLLM's placeholder hands its first argument on
            return state

    model, instances = build()
    model.layers[3] = Missing()
    with pytest.raises((ValueError, TypeError)):
        step(model, instances, [(Request(torch.arange(4)), 4)])


def forward_tree():
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(Attention.forward))))


def test_attention_is_found_once():
    """By parsing: one name is read from the registry, called once, with a scaling that is an attribute."""
    tree = forward_tree()
    lookups = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("ALL_ATTENTION_FUNCTIONS")
    ]
    assert len(lookups) == 1
    target = lookups[0].target if isinstance(lookups[0], ast.AnnAssign) else lookups[0].targets[0]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == ast.unparse(target)]
    assert len(calls) == 1
    given = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    assert ast.unparse(given["scaling"]) == "self.scaling" and None in given, "and **kwargs are handed on"


@pytest.mark.parametrize("fields", SERVED)
def test_three_linears_read_the_hidden_states(fields):
    """The query, key and value projections can be fused: nothing else in attention reads what they read."""
    model = FathomModel(tiny_config(**fields))
    found = [module for module in model.modules() if isinstance(module, Attention)]
    assert [module.layer_idx for module in found] == list(range(4))
    linears = {name for name, child in found[0].named_children() if isinstance(child, nn.Linear)}
    assert linears == {"q_proj", "k_proj", "v_proj", "o_proj"}
    calls = [ast.unparse(node) for node in ast.walk(forward_tree()) if isinstance(node, ast.Call)]
    reading = [call for call in calls if call.endswith("_proj(hidden_states)") and call.startswith("self.")]
    assert sorted(reading) == [f"self.{p}_proj(hidden_states)" for p in "kqv"]
    module = found[0]
    assert isinstance(module.scaling, float) and module.is_causal and module.config is model.config


@pytest.mark.parametrize("mixer", ["depth_attention", "uniform_depth", "value_residual"])
def test_mixers_keep_to_their_heads(mixer):
    """Under tensor parallelism a rank holds some key-value heads and their queries, and must need no others."""
    model = FathomModel(tiny_config(mixer=mixer)).eval()
    module = model.layers[3].self_attn.mixer
    count = len(module.source_layers(model.config, 3))
    query = torch.randn(1, 4, 6, 8)
    key, value, *sources = (torch.randn(1, 2, 6, 8) for _ in range(2 + 2 * count))
    whole = module(query, key, value, tuple(sources))
    for rank in range(2):
        heads = slice(rank, rank + 1)
        part = module(
            query[:, 2 * rank : 2 * rank + 2], key[:, heads], value[:, heads], tuple(s[:, heads] for s in sources)
        )
        torch.testing.assert_close(part, whole[:, heads], rtol=0, atol=1e-6)


def test_the_registry_finds_the_class(tmp_path, monkeypatch):
    """`getattr(transformers, architecture)`, `is_backend_compatible()`, a plan by names, `AutoModel` in auto_map."""
    registry = ModuleType("vllm.model_executor.models.registry")
    registry.transformers = ModuleType("transformers")  # the one that was there before transformers replaced itself
    models = {}
    registry.ModelRegistry = SimpleNamespace(register_model=lambda name, where: models.update({name: where}))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    vllm_plugin.register()
    file, _, name = models["FathomForCausalLM"].partition(":")
    source = Path(importlib.util.find_spec(file).origin).read_text()
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    directory = export_tiny(tmp_path / "tiny")
    raw = json.loads((directory / "config.json").read_text())
    assert "AutoModel" in raw["auto_map"]
    for module in (sys.modules["transformers"], registry.transformers):
        assert getattr(module, raw["architectures"][0]) is FathomForCausalLM
    assert FathomForCausalLM.is_backend_compatible() and FathomModel.is_backend_compatible()
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(directory))
    assert model.get_decoder() is model and isinstance(model.get_input_embeddings(), nn.Embedding)
    sharded = {pattern.split(".")[-1] for pattern, style in model.tp_plan.items() if style in ("colwise", "rowwise")}
    assert sharded == {n.split(".")[-1] for n, m in model.layers[0].named_modules() if isinstance(m, nn.Linear)}


def test_the_entry_point():
    (found,) = entry_points(group="vllm.general_plugins", name="fathom")
    assert found.load() is vllm_plugin.register
