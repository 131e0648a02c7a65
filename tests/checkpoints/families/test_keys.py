"""The keys of every family, compared with the installed classes, and what becomes of seeded edits of them."""

from __future__ import annotations

import ast
import copy
import inspect
import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fathom import FathomConfig, FathomForCausalLM, load
from fathom.checkpoints.families import FAMILIES
from fathom.checkpoints.families.family import ROPE
from fathom.checkpoints.families.keys import BACKEND, BOOKKEEPING, CAUSAL, ROPE_READ, TOKEN
from fathom.checkpoints.runs import changes_of
from fathom.checkpoints.runs import config_of as config_of_block
from fathom.cli.main import main
from fathom.training.source import model_of
from tests.checkpoints import edits
from tests.checkpoints.edits import Config, draw
from tests.tiny import tiny_tokenizer

from .cases import CASES, randomise, stock, stock_config

PARTS = ("Attention", "DecoderLayer", "MLP", "RotaryEmbedding", "Model", "ForCausalLM", "LMHeadModel", "Block", "Layer")
LATER = ("_attn_implementation", "use_cache", "num_labels", "output_attentions", "output_hidden_states", "pad_token_id")
"""What the classes read of a configuration without a consequence for the logits; dropout is not applied here."""
UNUSED = {("gemma3_text", "attn_logit_softcapping")}
"""What a class reads and does not use."""
every_family = pytest.mark.parametrize("family", FAMILIES)


def case_of(family: str) -> str:
    return next(name for name in CASES if stock_config(name).model_type == family and name != "mistral-whole")


def config_of(family: str) -> Config:
    """The `config.json` of a small model, without what transformers fills in."""
    config = stock_config(case_of(family)).to_dict()
    kept = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    return json.loads(json.dumps({key: value for key, value in kept.items() if key != "dtype"}))


def names_of(tree: ast.AST, holder: str) -> set[str]:
    """Attributes and string keys that code reads of a variable, or of an attribute of `self` with its name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (holder, f"self.{holder}"):
            found.add(node.attr)
        if (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value) == holder
            and isinstance(node.slice, ast.Constant)
        ):
            found.add(str(node.slice.value))
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("getattr", "hasattr") and ast.unparse(node.args[0]) in (holder, f"self.{holder}"):
            found.add(ast.literal_eval(node.args[1]))
        if called == f"{holder}.get":
            found.add(ast.literal_eval(node.args[0]))
    return found


@cache
def read_by_class(family: str) -> set[str]:
    """What the classes of a family's causal language model read of their configuration, by their source."""
    model = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]
    module = ast.parse(inspect.getsource(inspect.getmodule(model)))
    found: set[str] = set()
    for part in module.body:
        if isinstance(part, ast.ClassDef) and part.name.endswith(PARTS) and not part.name.startswith("Gemma3Model"):
            found |= names_of(part, "config")
    return found


@every_family
def test_every_declared_key_has_a_place(family: str) -> None:
    keys = FAMILIES[family].keys
    places = {*keys.read, *keys.ignored, *keys.off, *BOOKKEEPING, *CAUSAL, "is_causal"}
    declared = {one.name for one in fields(CONFIG_MAPPING[family])}
    assert {key for key in declared - places if not key.endswith(TOKEN)} == set()


@every_family
def test_what_the_class_reads_is_built_or_refused(family: str) -> None:
    keys, read = FAMILIES[family].keys, read_by_class(family)
    meant = {key for key in read if "drop" not in key and key not in LATER and (family, key) not in UNUSED}
    assert meant - {*keys.read, *keys.off, *CAUSAL} == {"get_text_config"} & meant
    assert not {key for key in keys.ignored if key in meant}


@every_family
def test_what_is_built_is_read_by_the_class(family: str) -> None:
    """A key of a relative that the class does not read is not obeyed."""
    cls = CONFIG_MAPPING[family]
    known = {one.name for one in fields(cls)} | {*cls.attribute_map, *ROPE} | read_by_class(family)
    source = inspect.getsource(cls)
    assert {key for key in FAMILIES[family].keys.read if key not in known and f'"{key}"' not in source} == set()


@pytest.mark.parametrize("kind", ROPE_READ)
def test_each_rotary_type_reads_what_its_function_reads(kind: str) -> None:
    common = {"rope_theta", "partial_rotary_factor"}
    if kind == "default":
        return
    tree = ast.parse(inspect.getsource(ROPE_INIT_FUNCTIONS[kind]))
    read = names_of(tree, "rope_parameters_dict") | names_of(tree, "config.rope_parameters")
    assert read - common - {"get"} == set(ROPE_READ[kind]) - common
    assert set(ROPE_READ) == {"default", *ROPE_INIT_FUNCTIONS}


def test_what_masks_read_of_a_configuration() -> None:
    read: set[str] = set()
    for function in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
        read |= names_of(ast.parse(inspect.getsource(function)), "config")
    assert read == {"is_causal", "sliding_window", "_attn_implementation"}


VALUES: Config = {
    **{"sliding_window": 3, "layer_types": ["full_attention"] * 3, "max_window_layers": 1, "n_ctx": 5, "seq_length": 3},
    **{"rotary_emb_base": 77, "dual_chunk_attention_config": {"chunk_size": 4}, "hidden_act": "relu", "dropout": 0.5},
    **{"hidden_activation": "relu", "attn_logit_softcapping": 0.5, "_sliding_window_pattern": 1, "pretraining_tp": 2},
    **{"summary_type": "mean", "summary_activation": "tanh", "sliding_window_size": 2, "layerdrop": 0.5},
}
"""Values of ignored keys that would matter if they were read; those of the others are `true`."""


def logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


IDS = torch.randint(1, 90, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.quick("gpt2", "granite", "smollm3", "llama", "gemma2")
@every_family
def test_ignored_keys_change_nothing_in_either_class(family: str, tmp_path: Path) -> None:
    theirs, keys = stock(case_of(family)), FAMILIES[family].keys
    theirs.save_pretrained(tmp_path)
    more = {
        key: VALUES.get(key, 0.5 if "drop" in key else True) for key in (*keys.ignored, "use_bfloat16", "torchscript")
    }
    more |= {key: value for key, value in edits.BOOKKEEPING.items() if key not in ("torch_dtype", "auto_map")}
    config = json.loads((tmp_path / "config.json").read_text()) | more
    before = FathomConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(again, IDS), logits(theirs, IDS))
    after = FathomConfig.from_pretrained(tmp_path)
    others = ("native", "bos_token_id", "eos_token_id", "use_cache")
    assert {k: v for k, v in vars(before).items() if k not in others} == {
        k: v for k, v in vars(after).items() if k not in others
    }


@pytest.mark.quick("keys3-*", "*-llama", "*-gpt2")
@every_family
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"is_causal": False}, "is_causal=false: Fathom's decoder is causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true: Fathom's decoder is causal"),
        ({"per_layer_config": {"0": {"intermediate_size": 5}}}, "per_layer_config"),
        ({"my_depth": 3}, "my_depth=3: Fathom does not know this key of FAMILY models"),
        ({"one": 1, "two": None}, r'one=1, and 1 more: .*ignore_keys=\["one", "two"\]` opens'),
        ({"vocab_sizes": 9}, r"of FAMILY models; did you mean vocab_size\? `ignore_keys="),
        ({"my_depth": 9}, "of FAMILY models; `ignore_keys="),
        ({"text_config": {"hidden_size": 8}}, "text_config"),
        ({"attention_chunk_size": 4}, "attention_chunk_size=4"),
    ],
)
def test_what_is_unknown_or_not_built_is_refused_by_name(family: str, keys: Config, says: str) -> None:
    config = config_of(family)
    read(config)
    with pytest.raises(ValueError, match=says.replace("FAMILY", family)) as caught:
        read(config | keys)
    assert "\n" not in str(caught.value)


WINDOWLESS = [name for name, one in FAMILIES.items() if "sliding_window" not in one.keys.read]
FULL, MIXED = ["full_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("family", WINDOWLESS)
def test_a_window_that_only_the_cache_of_transformers_follows_is_refused(family: str) -> None:
    config = config_of(family)
    context = config.get("n_positions") or config["max_position_embeddings"]
    for harmless in ({"sliding_window": context}, {"sliding_window": 4, "layer_types": FULL}, {"sliding_window": None}):
        assert read(config | harmless).sliding_window is None
    for window in ({"sliding_window": 4}, {"sliding_window": 4, "use_sliding_window": False}, {"sliding_window": 0}):
        with pytest.raises(ValueError, match=rf"sliding_window=.: the layers of {family} models have no window"):
            read(config | window)
    for kinds in (MIXED, ["sliding_attention"] * 3, ["linear_attention"] * 3):
        with pytest.raises(ValueError, match=r'layer_types=.*ignore_keys=\["layer_types"'):
            read(config | {"layer_types": kinds})


def test_types_of_layers_that_phi3_ignores_and_its_cache_follows(tmp_path: Path) -> None:
    config = config_of("phi3") | {"sliding_window": 4}
    for kinds in (FULL, ["sliding_attention"] * 3):
        assert read(config | {"layer_types": kinds}).sliding_window == 4
    with pytest.raises(ValueError, match="layer_types"):
        read(config | {"layer_types": MIXED})


def test_the_cache_of_transformers_forgets_by_a_window_that_the_layers_do_not_have() -> None:
    """Why such a file is refused; if this fails, transformers has changed."""
    theirs, ids = stock("llama-gqa"), IDS[:1]
    for window, same in ((None, True), (4, False)):
        theirs.config.sliding_window = window
        rest = theirs(ids[:, 12:], past_key_values=theirs(ids[:, :12], use_cache=True).past_key_values).logits
        assert torch.allclose(rest, theirs(ids, use_cache=False).logits[:, 12:], atol=1e-4) is same


def read(config: Config, **more: Any) -> FathomConfig:
    """The configuration of a directory with this `config.json`."""
    from fathom.models.foreign import reader

    return FathomConfig.from_dict(reader().configuration(copy.deepcopy(config), "here"), **more)


@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if "rope_parameters" in one.shared])
def test_rotary_parameters_are_read_closed(family: str) -> None:
    config = {key: value for key, value in config_of(family).items() if key != "rope_parameters"}
    old = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e3}
    if family == "phi3":  # which has longrope alone
        old = {"rope_scaling": {"type": "default"}, "rope_theta": 5e3}
    known = read(config | old)
    unread = {**old["rope_scaling"], "beta_fast": 3.0, "mscale": 0.7}
    assert read(config | {**old, "rope_scaling": unread}).rope_parameters == known.rope_parameters
    unknown = {**old["rope_scaling"], "new_key": 3}
    with pytest.raises(ValueError, match=r"rope_scaling\.new_key=3: .*ignore_keys=.*rope_scaling\.new_key"):
        read(config | {**old, "rope_scaling": unknown})
    with pytest.raises(ValueError, match=r"rope_type|longrope"):
        read(config | {**old, "rope_scaling": {"rope_type": "mrope"}})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "granite"])
def test_a_part_of_a_head_is_rotated_where_the_class_can_only(family: str) -> None:
    config = config_of(family)
    ignored = read(config | {"partial_rotary_factor": 0.5})
    assert ignored.rope_parameters == read(config).rope_parameters
    config.pop("rope_parameters")
    with pytest.raises(ValueError, match="rotates all channels of a head"):
        read(config | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5})
    kept = read(config_of("gpt_neox") | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})
    assert kept.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("key", BACKEND)
def test_the_attention_backend_of_a_config_is_followed(key: str, tmp_path: Path) -> None:
    """A backend that may not be installed is not: which one runs is the caller's choice."""
    stock("llama-gqa").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: "eager"}))
    for model in (AutoModelForCausalLM, FathomForCausalLM):
        assert model.from_pretrained(tmp_path).config._attn_implementation == "eager"
    asked = FathomForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert asked.config._attn_implementation == "sdpa"
    assert read(config | {key: "flash_attention_2"})._attn_implementation is None


def test_values_that_a_class_does_without() -> None:
    """A padding token outside the embeddings of classes without a padding row, and no dropout."""
    for family in ("gpt2", "gpt_neox"):
        assert read(config_of(family) | {"pad_token_id": 97}).pad_token_id is None
        assert read(config_of(family) | {"pad_token_id": 96}).pad_token_id == 96
    assert read(config_of("llama") | {"attention_dropout": None}).attention_dropout == 0


def test_a_recipe_and_a_command_may_ignore_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = stock("qwen3", vocab_size=384)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"my_key": 3, "rope_scaling": {"other": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    block: Config = {"from_pretrained": str(tmp_path), "mixer": "value_residual"}
    with pytest.raises(ValueError, match="my_key=3, and 1 more"):
        config_of_block(block)
    block["ignore_keys"] = ["my_key", "rope_scaling.other"]
    assert config_of_block(block).mixer == "value_residual" and changes_of(block)["mixer"] == ("none", "value_residual")
    assert model_of(str(tmp_path), "key", config_of_block(block))[0].config.ignore_keys == block["ignore_keys"]
    assert load(tmp_path, "cpu", ignore_keys=block["ignore_keys"])[0].config.vocab_size == 384
    command = ["generate", str(tmp_path), "a", "--max-new-tokens", "1"]
    assert main([*command, "--ignore-keys", "my_key,rope_scaling.other"]) == 0
    assert main([*command, "--ignore-keys", "my_key"]) == 2
    said = capsys.readouterr().err
    assert "`ignore" not in said and "--ignore-keys rope_scaling.other opens the model" in said
    assert main(command) == 2 and "--ignore-keys my_key,rope_scaling.other opens" in capsys.readouterr().err


def test_keys_may_be_ignored_on_request(tmp_path: Path) -> None:
    theirs = stock("gpt2")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"is_causal": False, "new": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="new="):
        FathomForCausalLM.from_pretrained(tmp_path, ignore_keys=["is_causal"])
    keys = ["is_causal", "new"]
    ours = FathomForCausalLM.from_pretrained(tmp_path, ignore_keys=keys)
    assert torch.equal(logits(ours, IDS), logits(theirs, IDS))
    assert ours.config.ignore_keys == keys and not set(keys) & set(ours.config.native)
    assert FathomForCausalLM.from_pretrained(tmp_path, config=FathomConfig.from_pretrained(tmp_path, ignore_keys=keys))
    ours.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(FathomForCausalLM.from_pretrained(tmp_path / "again"), IDS), logits(theirs, IDS))


OLD = {"torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "_name_or_path": "org/name"}
LLAMA = {
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02},
    **{"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e4, "pretraining_tp": 1},
}
WINDOW = {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}
GEMMA = {
    **{"head_dim": 8, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    **{"cache_implementation": "hybrid", "rope_theta": 1e4, "attention_bias": False},
}
PHI3 = {
    **{"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "attention_bias": False, "embd_pdrop": 0.0},
    **{"resid_pdrop": 0.0, "original_max_position_embeddings": 64, "sliding_window": 2047, "pad_token_id": 1},
}
SU = {"rope_scaling": {"long_factor": [1.5] * 4, "short_factor": [1.0] * 4, "type": "longrope"}}
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True}}
PUBLISHED: dict[str, tuple[str, Config]] = {
    "smollm2": (
        "llama",
        {
            **LLAMA,
            **{"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": "x"}},
        },
    ),
    "llama-3.2 of unsloth": (
        "llama",
        {
            **{
                **LLAMA,
                "unsloth_fixed": True,
                "unsloth_version": "2025.1.5",
                "eos_token_id": [4, 5],
                "mlp_bias": False,
            },
            **{"head_dim": 8, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "pad_token_id": 2},
        },
    ),
    "llama-2": ("llama", {**LLAMA, "max_length": 4096, "_flash_attn_2_enabled": True, "max_sequence_length": 2048}),
    "smollm2 from gguf": ("llama", {**LLAMA, "_model_name_or_path": "Smollm2 135M", "unk_token_id": 0}),
    "yarn-llama": ("llama", {**LLAMA, **YARN}),
    "awq": ("llama", {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 4096, "tokenizer_class": "LlamaTokenizer", "head_dim": None}),
    "codeqwen": ("qwen2", {**LLAMA, **WINDOW, "rotary_emb_base": 1000000, "seq_length": 64}),
    "r1-distill-qwen": ("qwen2", {**WINDOW, "use_mrope": False}),
    "qwen2.5-1m": ("qwen2", {**WINDOW, "dual_chunk_attention_config": {"chunk_size": 9, "local_size": 3}}),
    "qwen3": ("qwen3", {**WINDOW, "sliding_window": None, "head_dim": 16, "rope_scaling": None, "rope_theta": 1e6}),
    "smollm3": (
        "smollm3",
        {
            **{**LLAMA, **WINDOW, "sliding_window": None, "mlp_bias": False, "no_rope_layer_interval": 4},
            **{
                "no_rope_layers": [1, 1, 1],
                "layer_types": ["full_attention"] * 3,
                "pretraining_tp": 2,
                "pad_token_id": 1,
            },
        },
    ),
    "pythia": ("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True}),
    "gpt-neox-20b": (
        "gpt_neox",
        {
            **{"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "hidden_act": "gelu_fast"},
            **{"rotary_emb_base": 10000, "rotary_pct": 0.25, "classifier_dropout": 0.1, "custom_pipelines": {}},
        },
    ),
    "gpt2": (
        "gpt2",
        {
            **{"n_ctx": 1024, "n_special": 0, "predict_special_tokens": True, "gradient_checkpointing": False},
            **{"resid_pdrop": 0.1, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}},
            **{"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "_num_labels": 1, "output_past": True},
        },
    ),
    "polyglot-ko": ("gpt_neox", {"num_steps": "global_step213000", "rotary_pct": 0.5, "rotary_emb_base": 10000}),
    "gpt-sw3": ("gpt2", {"apply_query_key_layer_scaling": True, "normalize_attention_scores": True}),
    "kogpt2": ("gpt2", {"author": "A", "created_date": "2021-04-28", "license": "CC-BY-NC-SA 4.0"}),
    "opt": (
        "opt",
        {
            **{
                "activation_dropout": 0.0,
                "prefix": "</s>",
                "word_embed_proj_dim": 48,
                "_remove_final_layer_norm": False,
            },
            **{"dropout": 0.1, "layerdrop": 0.0, "do_layer_norm_before": True, "init_std": 0.02},
        },
    ),
    "galactica": ("opt", {"learned_embeddings": True, "scale_embeddings": False, "enable_bias": False}),
    "olmo2": ("olmo2", {**LLAMA, "clip_qkv": None}),
    "gemma": ("gemma", {**GEMMA, "hidden_activation": None}),
    "gemma-2": ("gemma2", {**GEMMA, "sliding_window_size": 4096, "query_pre_attn_scalar": 224}),
    "gemma-3": (
        "gemma3_text",
        {
            **{**GEMMA, "sliding_window_pattern": 6, "_sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
            **{"attn_logit_softcapping": None, "use_bidirectional_attention": False, "rope_scaling": None},
        },
    ),
    "granite": ("granite", {**LLAMA, "attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "mlp_bias": False}),
    "phi-3-128k": ("phi3", {**PHI3, **SU}),
    "phi-4-mini": (
        "phi3",
        {
            **{**PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
            "partial_rotary_factor": 0.75,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_open(name: str) -> None:
    """The keys of well-known files, with small sizes."""
    family, keys = PUBLISHED[name]
    sizes = {"vocab_size": 97, "num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 48}
    sizes |= {"num_key_value_heads": 3} if "num_key_value_heads" in FAMILIES[family].shared else {}
    inner = "ffn_dim" if family == "opt" else "n_inner" if family == "gpt2" else "intermediate_size"
    config = {"model_type": family, "architectures": ["X"], **OLD, **sizes, inner: 74, **keys}
    assert read(config).num_hidden_layers == 3


# --- seeded edits -----------------------------------------------------------------------------------------------------


def outcome(config: Config, edited: Config, directory: Path, theirs: torch.nn.Module) -> tuple[str, bool]:
    """What becomes of an edit, and whether the family's class computes the same as without it.

    `same`: both classes compute the same, to the last bit. `other`: they do not. `refused` by Fathom, or `impossible`
    for the class.
    """
    kind = edited.get("model_type")
    torch.manual_seed(0)
    (directory / "config.json").write_text(json.dumps(edited))
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()
        alike = {k: v.shape for k, v in model.state_dict().items()} == {
            k: v.shape for k, v in theirs.state_dict().items()
        }
        if alike:
            model.load_state_dict(theirs.state_dict())
        else:
            randomise(model)
        wanted = logits(model, IDS)
    except Exception:
        return "impossible", False
    ignored = alike and torch.equal(wanted, logits(theirs, IDS))
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(edited))
    try:
        found = logits(FathomForCausalLM.from_pretrained(directory, attn_implementation=backend(kind)), IDS)
    except ValueError as error:
        assert "\n" not in str(error)
        return "refused", ignored
    return "same" if (found - wanted).abs().max() <= (1e-5 if kind == "phi3" else 0) else "other", ignored


def backend(kind: object) -> str:
    return "eager" if kind == "gemma2" else "sdpa"


def counted(family: str, seeds: range, place: Path) -> dict[tuple[str, str, bool], int]:
    """How many edits of each kind ended in which way."""
    config, theirs = config_of(family), stock(case_of(family), attn_implementation=backend(family))
    found: dict[tuple[str, str, bool], int] = {}
    kinds = sorted(edits.KINDS)
    for seed in seeds:
        edit = draw(config, seed, kinds[seed % len(kinds)])
        end, ignored = outcome(config, edit.config, place, theirs)
        assert end != "other", (family, seed, edit.kind, edit.words)
        found[edit.kind, end, ignored] = found.get((edit.kind, end, ignored), 0) + 1
    return found


def check_counts(found: dict[tuple[str, str, bool], int]) -> None:
    """What the class ignores opens, but for undeclared keys, which are refused."""
    for (kind, end, ignored), _ in found.items():
        if kind == "undeclared":
            assert end in ("refused", "impossible")
        elif kind in ("bookkeeping", "order", "drop", "null", "value"):
            assert end in ("same", "impossible") or not ignored, (kind, end)


@pytest.mark.quick("llama", "gpt_neox")
@every_family
def test_an_edit_is_followed_to_the_last_bit_or_refused(family: str, tmp_path: Path) -> None:
    check_counts(counted(family, range(7), tmp_path))


@pytest.mark.slow
@every_family
def test_many_edits_are_followed_to_the_last_bit_or_refused(family: str, tmp_path: Path) -> None:
    check_counts(counted(family, range(7, 147), tmp_path))


def test_an_edit_that_is_obeyed_against_the_class_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: Llama with a window that its class ignores, and a reader that obeys it."""
    from fathom.checkpoints.families.llama import LLAMA, MISTRAL

    config, theirs = config_of("llama"), stock(case_of("llama"))
    edited = config | {"sliding_window": 4, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    assert outcome(config, edited, tmp_path, theirs) == ("same", True)
    monkeypatch.setitem(
        FAMILIES,
        "llama",
        MISTRAL.__class__(**{**vars(LLAMA), "switches": MISTRAL.switches, "further": ("sliding_window",)}),
    )
    assert outcome(config, edited, tmp_path, theirs) == ("other", True)
