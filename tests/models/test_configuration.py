"""The configuration refuses, in one line, whatever cannot be, and round-trips whatever can."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.generic import find_labels

from fathom import FathomForCausalLM
from fathom.models import FathomConfig
from fathom.models.registry import MECHANISMS, across_trips, mechanism_name, parse_mechanism

from .cases import CASES, SHAPE, build, config_of, tokens


def config(**keys):
    return FathomConfig(**{**SHAPE, **keys})


BAD_OPTIONS = [
    # mechanisms, the options of the last one, and what the refusal says
    ("depth_attention", {"stride": 0}, "mixer_options.stride must be between 1 and 4"),
    ("depth_attention", {"stride": 5}, "mixer_options.stride .* got 5"),
    ("depth_attention", {"stride": "2"}, "mixer_options.stride must be an integer or null, got '2'"),
    ("depth_attention", {"strid": 2}, r"strid is not an option of depth_attention \(it has"),
    ("depth_attention", {"recent_layers": -1}, "recent_layers must be between 0 and 4, got -1"),
    ("depth_attention", {"across_trips": "grid"}, "across_trips must be one of none"),
    ("depth_attention", {"self_bias": float("nan")}, "self_bias must be a number"),
    ("uniform_depth", {"self_bias": 1.0}, "self_bias is not an option of uniform_depth"),
    ("denseformer", {"dilation": 0}, "residual_options.dilation must be between 1 and 4 .* got 0"),
    ("denseformer", {"period": 9}, "residual_options.period .* got 9"),
    (
        "attention_residuals",
        {"variant": "x"},
        "variant must be one of block_sum, snapshot, delta, delta_block, inkling2, got 'x'",
    ),
    ("attention_residuals", {"block_size": 0}, "block_size must be at least 1, got 0"),
    ("hyper_connections", {"streams": 0}, "streams must be at least 1, got 0"),
    ("hyper_connections", {"sinkhorn_iterations": -1}, "sinkhorn_iterations must not be negative, got -1"),
    (
        "hyper_connections",
        {"per_visit": True},
        "per_visit: recurrence=once has one iteration; set per_visit to false",
    ),
    ("ponder2+hyper_connections", {"per_visit": True}, "per_visit: recurrence=ponder2 has all iterations in one pass"),
    ("mudd", {"ways": "vq"}, "ways must be some of the letters qkvr, in order, got 'vq'"),
    ("mudd", {"ways": ""}, "ways must be"),
    ("mudd", {"last": 5}, "last must be between 1 and 4"),
    ("mudd", {"sources": "some"}, "sources must be one of all, few"),
    ("mudd", {"hidden": 0}, "hidden must be at least 1"),
    ("mudd", {"norm": "post"}, "norm must be one of none, prepost, got 'post'"),
    ("loop", {"injection": "linear"}, "injection must be one of none, add, diagonal, got 'linear'"),
    ("loop", {"kv": "last"}, "kv must be one of own, first, got 'last'"),
    ("loop", {"norm_between": "both"}, "norm_between must be one of none, final, own, got 'both'"),
    ("loop", {"entry_norm": True}, "nothing is injected"),
    ("loop", {"trips": 3, "trips_range": [4, 6]}, r"trips must lie in trips_range \[4, 6\], got 3"),
    ("loop", {"trips": 3, "trips_max": 2}, "trips_max must be at least 3, got 2"),
    ("loop", {"trips": 0}, "recurrence_options.trips must be at least 1, got 0"),
    ("loop", {"trips": 2.5}, "recurrence_options.trips must be an integer, got 2.5"),
    ("loop", {"prelude": 2, "coda": 2}, r"at least one of the 4 layers to loop, got 2 \+ 2"),
    ("loop", {"prelude": -1}, "prelude"),
    ("loop", {"count": 2}, r"count is not an option of loop \(it has: .*trips"),
    ("loop", {"damping": 0.0}, r"damping must lie above 0 and be at most 1, got 0\.0"),
    ("loop", {"damping": 0.5, "injection": "add"}, "damping: set injection and norm_between to none, or damping to 1"),
    ("loop", {"damping": 0.5, "early_loss": 0.1}, "early_loss needs damping 1 and blend 1"),
    ("loop", {"blend": 0.5, "early_loss": 0.1}, "early_loss needs damping 1 and blend 1"),
    ("loop", {"blend": 1.5}, r"recurrence_options\.blend must lie in 0\.\.1, or be learned, got 1\.5"),
    ("depth_attention", {"blend": 1.5}, r"mixer_options\.blend must lie in 0\.\.1, or be learned, got 1\.5"),
    ("attention_residuals", {"blend_steps": -1}, r"residual_options\.blend_steps must not be negative, got -1"),
    (
        "denseformer+loop",
        {"trips": 2, "coda": 1, "blend": 0.5},
        "blend with a coda needs residual=plain, got denseformer",
    ),
    ("mudd+loop", {"trips": 2, "coda": 1, "damping": 0.5}, "damping with a coda needs residual=plain, got mudd"),
    ("loop", {"early_loss": -1.0}, "early_loss must not be negative"),
    ("loop", {"exit": "soon"}, "exit must be one of none, joint, gate, got 'soon'"),
    ("loop", {"exit": "joint", "exit_threshold": 0.0}, "exit_threshold must lie above 0"),
    ("loop", {"exit": "joint", "exit_entropy": -1.0}, "exit_entropy must not be negative"),
    ("loop", {"exit": "joint", "coda": 1}, "exit: a coda runs only after the last iteration"),
    ("loop", {"exit": "joint", "damping": 0.5}, "exit needs damping 1"),
    ("loop", {"exit": "joint", "early_loss": 0.1}, "early_loss and exit both read out early iterations"),
    ("ponder", {"top_k": -1}, "top_k must be 0"),
    ("ponder", {"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ("ponder", {"trips": 4, "trips_range": [2, 3]}, r"trips must lie in trips_range \[2, 3\], got 4"),
    ("ponder", {"trips_range": [3, 1]}, r"trips_range must be \[least, most\], got \[3, 1\]"),
    ("ponder", {"feed": "logits"}, "feed must be one of mixture, hidden, projected, pause, got 'logits'"),
    ("ponder", {"view": "some"}, "view must be one of same, duo, all, got 'some'"),
    ("ponder2", {"prefill": "soon"}, "prefill must be one of jacobi, exact, got 'soon'"),
    ("ponder2", {"jacobi_train": [2]}, "jacobi_train"),
    ("ponder2", {"jacobi_eval": -1}, "jacobi_eval must not be negative, got -1"),
    ("ponder2", {"gradient_passes": -1}, "gradient_passes must not be negative, got -1"),
    ("ponder2", {"tau": 0.5}, "tau is not an option of ponder2"),
    ("ponder3", {"tau": 0.0}, "tau must lie between 0 and 1, got 0.0"),
    ("ponder3", {"router_damping": 0.0}, r"router_damping must lie in \(0, 1\], got 0.0"),
    ("ponder3", {"penalty": "all"}, "penalty must be one of prefix_quality, expected_trips, none, got 'all'"),
    ("ponder3", {"penalty_over": "world"}, "penalty_over must be one of row, batch, got 'world'"),
    ("ponder3", {"penalty_token_fraction": 0.0}, r"penalty_token_fraction must lie in \(0, 1\], got 0.0"),
    ("adaponder", {"penalty_on": "gate"}, "penalty_on must be one of sigmoid, logit, got 'gate'"),
    ("adaponder", {"penalty_span": [0.3, 0.1]}, "penalty_span must be two fractions of training"),
    ("adaponder", {"penalty_fraction": 2.0}, "penalty_fraction must lie in 0..1, got 2.0"),
    ("adaponder", {"tau": 1.0}, "tau must lie between 0 and 1, got 1.0"),
    ("latent_cot", {"tau": 2.0}, "tau must lie between 0 and 1, got 2.0"),
    ("latent_cot", {"penalty_beta": -1.0}, "penalty_beta must not be negative"),
]
BAD_KEYS = [
    *(
        ({"recurrence": "loop", "max_trips": bad}, "max_trips must be between 1 and 3")
        for bad in ("two", [2], 1.5, True)
    ),
    *(({"residual_multiplier": bad}, "residual_multiplier must be a positive") for bad in ("half", None, True, [])),
    ({"position_offset": None}, "position_offset must be an integer of at least 0, got None"),
    ({"no_rope_layers": 1}, "no_rope_layers must be a list or null, got 1"),
    ({"attn_logit_softcapping": "50"}, "attn_logit_softcapping must be a positive number, got 50"),
    ({"num_attention_heads": 5}, r"num_attention_heads \(5\) must be a multiple of num_key_value_heads \(2\)"),
    ({"head_dim": 7}, "head_dim"),
    ({"mixer": "depth_attn"}, "mixer must be one of none, .* got 'depth_attn'; did you mean depth_attention"),
    ({"mixer": "loop"}, "mixer must be one of"),
    ({"residual": "dense"}, "residual must be one of plain, denseformer"),
    ({"recurrence": "ponder9"}, "recurrence must be one of once, loop"),
    ({"k_norm_position": "middle"}, "k_norm_position must be one of before_rope, after_rope"),
    ({"output_init": "deep"}, "output_init must be one of plain, depth, got 'deep'"),
    (
        {
            **{"mixer": "depth_attention", "mixer_options": {"across_trips": "first"}},
            **{"recurrence": "loop", "recurrence_options": {"kv": "first"}},
        },
        "across_trips must be one of none with recurrence=loop and shared keys and values, got first",
    ),
    (
        {
            **{"residual": "hyper_connections", "residual_options": {"per_visit": True}},
            **{"recurrence": "loop", "recurrence_options": {"trips": 2, "trips_range": [2, 4]}},
        },
        "per_visit: set recurrence_options.trips to its maximum 4, got 2",
    ),
    ({"mixer_options": {"stride": 2}}, r"stride is not an option of none \(it has: none\)"),
    ({"mixer": "depth_attention", "mixer_options": [1]}, "mixer_options must be a dictionary"),
    ({"mixr": "depth_attention"}, "mixr is not a key of the configuration; did you mean mixer"),
    ({"hidden_size": 0}, "hidden_size must be at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
]


def test_a_tuple_of_options_is_the_list_that_a_file_holds():
    made = [FathomConfig(recurrence="loop", recurrence_options={"trips_range": kind((1, 4))}) for kind in (tuple, list)]
    assert made[0].recurrence_options == made[1].recurrence_options


@pytest.mark.parametrize("keys,says", BAD_KEYS)
def test_errors_are_one_clear_line(keys, says):
    with pytest.raises(ValueError, match=says) as error:
        config(**keys)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name,options,says", BAD_OPTIONS)
def test_bad_options_are_one_clear_line(name, options, says):
    axis = MECHANISMS[name.split("+")[-1]].axis
    with pytest.raises(ValueError, match=says) as error:
        config(**parse_mechanism(name), **{f"{axis}_options": options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", [case for case in CASES if "@" not in case or case.startswith("vanilla")])
def test_round_trip(case, tmp_path):
    original = config_of(case)
    original.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is FathomConfig
    assert {**again.to_dict(), "_name_or_path": ""} == original.to_dict()
    assert parse_mechanism(mechanism_name(again)) == parse_mechanism(CASES[case][0])


def test_options_are_stored_resolved():
    assert config(mixer="depth_attention").mixer_options["stride"] == 2
    looped = config(mixer="depth_attention", recurrence="loop")
    assert across_trips(looped) == "same_layer" and across_trips(config(mixer="depth_attention")) == "none"


@pytest.mark.parametrize("text", ["vanilla+nothing", "depth_attention+uniform_depth", ""])
def test_bad_mechanism_names(text):
    with pytest.raises(ValueError):
        parse_mechanism(text)


def qwen3(directory):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    model.save_pretrained(directory)
    return model


def test_overrides_retrofit(tmp_path):
    qwen3(tmp_path)
    model = FathomForCausalLM.from_pretrained(tmp_path, mixer="depth_attention", mixer_options={"stride": 1})
    assert model.config.mixer_options["stride"] == 1
    dense = FathomForCausalLM.from_pretrained(tmp_path, residual="denseformer")
    assert all(p.isfinite().all() for p in dense.parameters())
    with torch.no_grad():
        ids = tokens(1, 9)
        assert torch.equal(dense(ids).logits, FathomForCausalLM.from_pretrained(tmp_path)(ids).logits)
    with pytest.raises(ValueError, match="stride must be between"):
        FathomForCausalLM.from_pretrained(tmp_path, mixer="depth_attention", mixer_options={"stride": 99})


def test_changing_the_mechanism_drops_the_old_options(tmp_path):
    build(config_of("depth_attention-dense")).save_pretrained(tmp_path)
    model = FathomForCausalLM.from_pretrained(tmp_path, mixer="value_residual")
    assert "stride" not in model.config.mixer_options


def test_without_a_checkpoint_everything_is_new():
    """transformers' way to a fresh model; one tensor makes it a checkpoint, and then an incomplete one."""
    config = config_of("hyper_connections")
    model = FathomForCausalLM.from_pretrained(None, config=config, state_dict={})
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ValueError, match="the checkpoint lacks"):
        FathomForCausalLM.from_pretrained(None, config=config, state_dict={"model.norm.weight": torch.ones(32)})


def test_another_architecture_is_refused(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a bloom model: its embeddings are normed before the layers"):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_one_option_changes_alone(tmp_path):
    build(config_of("depth_attention-dense")).save_pretrained(tmp_path)
    model = FathomForCausalLM.from_pretrained(tmp_path, mixer_options={"self_bias": 5.0})
    assert model.config.mixer_options["stride"] == 1 and model.config.mixer_options["self_bias"] == 5.0


def test_trips_may_be_taken_away_and_added(tmp_path):
    build(config_of("loop+depth_attention")).save_pretrained(tmp_path)
    once = FathomForCausalLM.from_pretrained(tmp_path, recurrence="once")
    assert across_trips(once.config) == "none"
    once.save_pretrained(tmp_path / "once")
    again = FathomForCausalLM.from_pretrained(tmp_path / "once", recurrence="loop")
    assert across_trips(again.config) == "same_layer"


def test_a_declared_mechanism_without_tensors_is_refused(tmp_path):
    """Only a mechanism that the checkpoint does not name may start from its initial values."""
    build(config_of("hyper_connections")).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if "_residual" not in name}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the checkpoint lacks model"):
        FathomForCausalLM.from_pretrained(tmp_path)
    FathomForCausalLM.from_pretrained(tmp_path, residual="plain")


def test_only_labels_are_labels():
    """Trainer passes over an evaluation loss if a model seems to want other labels too."""
    assert find_labels(FathomForCausalLM) == ["labels"]


def test_hidden_states_as_the_configuration_says(tmp_path):
    theirs = qwen3(tmp_path)
    ours, ids = FathomForCausalLM.from_pretrained(tmp_path, output_hidden_states=True), tokens(1, 9)
    with torch.no_grad():
        found, wanted = ours(ids).hidden_states, theirs(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "qk_norm,theirs,gone",
    [
        ("head", Qwen3Config, ()),
        ("full", Olmo2Config, ()),
        ("none", LlamaConfig, ()),
        ("none", LlamaConfig, ("gate_proj",)),
    ],
)
def test_projections_are_split_over_processes_as_their_family_splits_them(qk_norm, theirs, gone):
    found = config(qk_norm=qk_norm, gated_mlp=not gone)
    wanted = {name: how for name, how in theirs.base_model_tp_plan.items() if not name.endswith(gone or "-")}
    assert found.base_model_tp_plan == wanted and "base_model_tp_plan" not in found.to_dict()
