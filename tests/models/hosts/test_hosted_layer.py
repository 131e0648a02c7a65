"""A family's own layers in our walk: files, exports, refusals, caches. What is computed is in `test_odd_shapes.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeModel

import fathom
from fathom import FathomConfig, FathomForCausalLM
from fathom.checkpoints.export import export
from fathom.checkpoints.families import FAMILIES, hosted
from fathom.checkpoints.families.layouts import HOSTS, Host
from fathom.errors import ModelError
from fathom.models.cost import count_parameters, mechanism_cost
from fathom.models.hosts.hosted_layer import OneLayer
from fathom.models.hosts.layout import Layout
from fathom.models.recurrences.vocabulary_mixture import probabilities
from fathom.models.trips.slots import plan

from .cases import SHAPE, SHAPES, backend_of, configured, ours_of, stepwise, theirs_of, tokens

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2", "granitemoehybrid", "olmo3", "phi")
"""One of a kind: experts, sinks, latents, delta net, convolution, state space, norms after, a parallel layer."""
LOOP: dict[str, Any] = {"recurrence": "loop", "recurrence_options": {"trips": 2}}
PONDER: dict[str, Any] = {"recurrence": "ponder3", "recurrence_options": {"trips": 3, "prefill": "exact"}}
MIXER: dict[str, Any] = {"mixer": "depth_attention", "mixer_options": {"stride": 1}}
RESIDUALS: tuple[dict[str, Any], ...] = ({"residual": "hyper_connections"}, {"residual": "attention_residuals"})


def test_every_hosted_family_is_tried():
    assert HOSTS.keys() - FAMILIES.keys() == SHAPES.keys() and set(KINDS) <= SHAPES.keys()


def families() -> list[Any]:
    """All of them; one of a kind in the fast tests."""
    return [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in SHAPES]


def test_a_bank_that_trips_share_is_seen(monkeypatch):
    """The control: with one bank for both trips the decoded tokens differ, for keys and for states."""
    for name in ("qwen3_moe", "lfm2"):
        ours, ids = ours_of(theirs_of(name), **LOOP), tokens()
        with torch.no_grad():
            whole = ours(ids).logits
        make = OneLayer.__init__
        with monkeypatch.context() as patch:
            patch.setattr(OneLayer, "__init__", lambda self, cache, bank, make=make: make(self, cache, bank % 4))
            assert (stepwise(ours, ids) - whole).abs().max() > 1e-2


@pytest.mark.parametrize("name", families())
def test_a_directory_opens_as_the_family_opens_it(name, tmp_path):
    """Experts that files hold one by one are joined; what is generated is the same."""
    # Youtu's class sets the padding token's row to zero after it was read
    theirs_of(name, **({"pad_token_id": None} if name == "youtu" else {})).save_pretrained(tmp_path)
    settings = {"attn_implementation": backend_of(name), "dtype": torch.float32}
    ours = FathomForCausalLM.from_pretrained(tmp_path, **settings).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **settings).eval()
    ids, asked = tokens(), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert torch.equal(ours.generate(ids, **asked), theirs.generate(ids, **asked))


@pytest.mark.parametrize(
    ("name", "mechanism", "says"),
    [
        ("lfm2", {"recurrence": "ponder3"}, "layer 0 is conv: its state cannot be rolled back"),
        ("lfm2", {"recurrence": "loop", "recurrence_options": {"kv": "first"}}, "its state cannot be rolled back"),
        ("deepseek_v3", {"mixer": "depth_attention", "mixer_options": {"mixes": "key"}}, "of one latent: set mixer"),
        ("kimi_linear", {"recurrence": "adaponder"}, "layer 0 is linear_attention: its state cannot be rolled back"),
        ("llama4_text", {"recurrence": "adaponder"}, "layers read chunks of a text"),
        (
            "llama4_text",
            {"recurrence": "loop", "recurrence_options": {"kv": "first"}},
            "attn_temperature_tuning scales queries by the length of the cache",
        ),
        ("gemma4_text", MIXER, "layers differ in number or size of key heads"),
        (
            "gemma4_text",
            {"mixer": "value_gain", "mixer_options": {"gates": "channel"}},
            "layers differ in number or size of key heads",
        ),
        ("qwen3_moe", {"residual": "mudd"}, "queries, keys and values have one input"),
        ("gemma4_text", RESIDUALS[0], "the layer scales what it adds to"),
        ("nemotron_h", RESIDUALS[0], "a layer is one sub-layer, not two"),
        ("qwen3_moe", {"output_init": "depth"}, "the family initialises its own projections"),
    ],
)
def test_what_is_not_possible_is_one_line(name, mechanism, says):
    theirs = theirs_of(name)
    with pytest.raises(ValueError, match=says) as refused:
        ours_of(theirs, **mechanism)
    assert str(refused.value).startswith(f"{name}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("keys", [{"depth_of_another": 2}, {"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_key_that_the_class_does_not_know_is_refused(keys):
    theirs = theirs_of("qwen3_moe").config.to_dict()
    hosted.require_known({**theirs, "unsloth_version": "2026.1", "use_cache": False})
    with pytest.raises(ValueError, match=next(iter(keys))):
        hosted.require_known({**theirs, **keys})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 3),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        ("attention_dropout", 0.3),
        ("rms_norm_eps", 0.5),
        ("hidden_act", "gelu"),
        ("hidden_size", 64),
    ],
)
def test_a_key_that_the_familys_layers_would_not_follow_is_refused(key, value):
    theirs = configured("gpt_oss", attention_dropout=0.1).to_dict()
    values = hosted.configuration(theirs)
    assert values["attention_dropout"] == 0.1, "by which training knows that its loss differs from an evaluation's"
    with torch.device("meta"), pytest.raises(ValueError, match=f"^{key}=.*gpt_oss model follow the family's own"):
        FathomForCausalLM(FathomConfig(**{**values, key: value}))


@pytest.mark.parametrize("name", ["vaultgemma", "gpt_oss", "afmoe"])
def test_halting_reads_a_text_as_it_decodes(name):
    """With capped logits, sinks and windows, outputs that are viewed as rows; a few rounds, the control, come near."""
    theirs, ids = theirs_of(name), tokens(1, 8)
    rounds = {**PONDER, "recurrence_options": {"trips": 3, "jacobi_eval": 2}}
    exact, near = ours_of(theirs, **PONDER), ours_of(theirs, **rounds)
    with torch.no_grad():
        decoded = stepwise(exact, ids, 1)
        assert (exact(ids).logits - decoded).abs().max() <= 2e-5
        assert (near(ids, use_cache=False).logits - decoded).abs().max() > 1e-4


def test_an_embedding_that_scales_is_named(monkeypatch):
    """A layout that does not say so would take the scale away without a word."""
    theirs = theirs_of("vaultgemma")
    with torch.no_grad():
        assert torch.equal(ours_of(theirs)(tokens()).logits, theirs(tokens()).logits)
    monkeypatch.setitem(HOSTS, "vaultgemma", Host(HOSTS["vaultgemma"].layouts))
    with pytest.raises(
        ValueError, match="vaultgemma: its embed_tokens scales embeddings: give embedding_scale in the switches"
    ):
        ours_of(theirs)


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_mixture_is_of_embeddings_as_the_model_norms_them(top_k):
    """Nanochat's first layer reads normed embeddings, without a scale; a second iteration adds a mean of such ones."""
    theirs, ids = theirs_of("nanochat"), tokens()
    ours = ours_of(theirs, recurrence="ponder", recurrence_options={"trips": 2, "top_k": top_k})
    layers = ours_of(theirs)
    layers.model.norms_embedding = False  # reads `inputs_embeds` as they are
    with torch.no_grad():
        words = theirs.model.norm(theirs.model.embed_tokens.weight)
        second = words[ids] + probabilities(theirs(ids).logits, top_k, 1.0) @ words
        wanted = layers(inputs_embeds=second).logits
        assert (ours(ids).logits - wanted).abs().max() <= 1e-5
    assert (ours(ids).logits - wanted).abs().max() <= 1e-5, "as in training, where the whole table is normed"


@pytest.mark.parametrize("key", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_gemma4_whose_layers_read_more_than_the_last_one_is_refused(key):
    theirs = {**theirs_of("gemma4_text").config.to_dict(), key: 2}
    with pytest.raises(ValueError, match=f"{key}=2: layers would read more than the previous layer's output"):
        hosted.configuration(theirs)


@pytest.mark.parametrize("name", ["afmoe", "llama4_text"])
def test_experts_may_return_rows_of_tokens(name):
    theirs, ids = theirs_of(name), tokens()
    with torch.no_grad():
        assert torch.equal(ours_of(theirs)(ids).logits, theirs(ids).logits)


def test_states_forbid_what_needs_a_crop(tmp_path):
    """transformers refuses prompt lookup where states cannot be cropped; copied flags say so here too."""
    ours = ours_of(theirs_of("qwen3_5_text"), **LOOP)
    with pytest.raises(ValueError, match="stateful"):
        ours.generate(tokens(1), max_new_tokens=3, prompt_lookup_num_tokens=2)


def test_another_backend_keeps_the_mechanism():
    ours, ids = ours_of(theirs_of("qwen3_moe"), **MIXER), tokens()
    with torch.no_grad():
        before = ours(ids).logits
        ours.set_attn_implementation("eager")
        assert ours.model.native_config()._attn_implementation == "eager"
        assert (ours(ids).logits - before).abs().max() <= 1e-5


@pytest.mark.parametrize("index", [0, 3])
def test_a_state_read_from_the_layers_is_the_banks(index):
    """Older families read `cache.layers[self.layer_idx]`, of which all trips through a layer have the same."""
    cache = Cache(layers=[DynamicLayer() for _ in range(4)])
    view = OneLayer(cache, 2)
    assert view.layers[index] is cache.layers[2]
    view.layers[index].record_past = True
    assert [hasattr(layer, "record_past") for layer in cache.layers] == [False, False, True, False]


def test_a_familys_names_of_layers_stay():
    """Also where transformers would rename them in classes that are not its own (5.16, LFM2)."""
    assert ours_of(theirs_of("lfm2")).config.layer_types == theirs_of("lfm2").config.layer_types


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_native_export_is_the_familys_own(name, tmp_path):
    theirs, ids = theirs_of(name), tokens()
    export(ours_of(theirs), tmp_path / "native", form="native")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "native", attn_implementation=backend_of(name)).eval()
    with torch.no_grad():
        assert type(again) is type(theirs) and torch.equal(again(ids).logits, theirs(ids).logits)
    with pytest.raises(ModelError, match="no other model family has"):
        export(ours_of(theirs, **LOOP), tmp_path / "loop", form="native")


def test_a_native_export_keeps_types_and_a_resized_vocabulary(tmp_path):
    """The biases that choose experts stay in float32 in a model in bfloat16."""
    theirs_of("deepseek_v3", num_hidden_layers=2).save_pretrained(tmp_path / "theirs")
    ours = FathomForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    ours.resize_token_embeddings(120, mean_resizing=False)
    export(ours, tmp_path / "native", form="native")
    again, kept = AutoModelForCausalLM.from_pretrained(tmp_path / "native").state_dict(), ours.state_dict()
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32, torch.bfloat16}
    assert again.keys() == kept.keys()
    assert all(kept[name].dtype == one.dtype and torch.equal(kept[name], one) for name, one in again.items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_native_export_keeps_a_head_that_was_tied_or_untied_since(tied, tmp_path):
    ours, ids = ours_of(theirs_of("cohere", num_hidden_layers=1, tie_word_embeddings=not tied)), tokens()
    ours.config.tie_word_embeddings = tied
    ours.lm_head.weight = torch.nn.Parameter(ours.lm_head.weight.detach().flip(0))
    if tied:
        ours.tie_weights()
    export(ours, tmp_path / "native", form="native")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "native").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, ours(ids).logits) and again.config.tie_word_embeddings == tied


ALONE = """
import sys, torch
sys.modules["fathom"] = None  # any import of it fails
from transformers import AutoModelForCausalLM
directory, file = sys.argv[1:]
ids, expected = torch.load(file, weights_only=True)
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, attn_implementation="sdpa").eval()
with torch.no_grad():
    assert torch.equal(model(ids).logits, expected)
"""


@pytest.mark.slow  # tests/checkpoints/test_export.py opens one
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_text"])
def test_an_export_with_a_mechanism_opens_without_fathom(name, tmp_path):
    """Its code imports the family from transformers, and joins the experts as the family's class does."""
    ours, ids = ours_of(theirs_of(name), **LOOP, **RESIDUALS[0]), tokens()
    export(ours, tmp_path / "export")
    with torch.no_grad():
        torch.save((ids, ours(ids).logits), tmp_path / "expected.pt")
    words = [sys.executable, "-c", ALONE, str(tmp_path / "export"), str(tmp_path / "expected.pt")]
    done = subprocess.run(words, env=os.environ | {"HF_HOME": str(tmp_path / "hub")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


class AcmeConfig(Qwen3MoeConfig):
    model_type = "acme"


class AcmeModel(Qwen3MoeModel):
    config_class = AcmeConfig


class AcmeForCausalLM(Qwen3MoeForCausalLM):
    config_class = AcmeConfig


def test_a_family_of_another_package(tmp_path, monkeypatch):
    """Known by one call, once its package has registered it with transformers."""
    with pytest.raises(ValueError, match="acme: register its configuration and models with transformers first"):
        fathom.add_family("acme", Layout())
    AutoConfig.register("acme", AcmeConfig)
    AutoModel.register(AcmeConfig, AcmeModel)
    AutoModelForCausalLM.register(AcmeConfig, AcmeForCausalLM)
    monkeypatch.setitem(HOSTS, "acme", HOSTS["qwen3_moe"])  # taken out again afterwards
    fathom.add_family("acme", Layout())
    config = AcmeConfig(**{**SHAPE, **SHAPES["qwen3_moe"]})
    theirs, ids = AcmeForCausalLM(config).eval(), tokens()
    theirs.save_pretrained(tmp_path / "acme")
    ours = FathomForCausalLM.from_pretrained(tmp_path / "acme", **LOOP).eval()
    plain = FathomForCausalLM.from_pretrained(tmp_path / "acme").eval()
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, theirs(ids).logits)
        assert (stepwise(ours, ids) - ours(ids).logits).abs().max() <= 1e-4


def test_a_family_without_sdpa_is_built_with_eager_attention():
    """Unless a caller asks for another, which the family's class refuses."""
    config = ours_of(theirs_of("gpt_oss")).config
    again = fathom.FathomConfig(**{k: v for k, v in config.to_dict().items() if not k.startswith("_attn")})
    for built in (FathomForCausalLM(again), AutoModelForCausalLM.from_config(again)):
        assert built.config._attn_implementation == built.model.host.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        AutoModelForCausalLM.from_config(again, attn_implementation="sdpa")


@pytest.mark.parametrize("name", ["phi", "cohere"])
@pytest.mark.parametrize(
    "mechanism",
    [
        {"residual": "denseformer"},
        {"residual": "branch_gain"},
        {"residual": "attention_residuals", "residual_options": {"variant": "delta", "blend": "learned"}},
    ],
    ids=["denseformer", "branch_gain", "delta"],
)
def test_a_residual_of_a_parallel_layer_starts_as_the_family(name, mechanism):
    """Phi rounds the sum of both updates first, Cohere each; and no query or gate is where the MLP reads no update."""
    theirs = theirs_of(name).bfloat16()
    ours = ours_of(theirs, **mechanism)
    logits = ours(tokens()).logits
    assert torch.equal(logits, theirs(tokens()).logits)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())
    added = count_parameters(ours.config) - sum(parameter.numel() for parameter in theirs.parameters())
    assert mechanism_cost(ours.config).parameters == added


def test_a_default_stride_is_half_the_layers_with_keys() -> None:
    theirs = theirs_of("lfm2", num_hidden_layers=8, layer_types=["conv", "full_attention"] * 4)
    config = ours_of(theirs, mixer="depth_attention").config
    assert config.mixer_options["stride"] == 2
    assert [visit.sources for visit in plan(config, 1)[0]][1::2] == [(), (1,), (1,), (1, 5)]
