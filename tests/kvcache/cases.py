"""The models and the schedule that the tests share: the card's standard toy."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from fathom.kvcache import build_cache, chunks
from tests.models.cases import CASES as MECHANISMS
from tests.models.cases import config_of
from tests.tiny import seeded

N, S, L, F = 64, 4, 28, 32
LENGTH = 135  # three compressions and a ragged group
SCHEDULE = dict(window=N, sinks=S, ratio=0.5)

SHAPE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    attn_implementation="sdpa",
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, rope_theta=10_000.0)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=10_000.0,
)
PROPORTIONAL = dict(rope_type="proportional", rope_theta=10_000.0, partial_rotary_factor=0.5)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=10_000.0)

REFUSED: dict[str, tuple[str, dict]] = {"hunyuan": ("hunyuan_v1_dense", {})}
SLIDING, FULL = "sliding_attention", "full_attention"

# id -> (model_type, changes to the shape)
MODELS: dict[str, tuple[str, dict]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-mha": ("qwen3", dict(num_key_value_heads=4)),
    "qwen3-mqa": ("qwen3", dict(num_key_value_heads=1)),
    "qwen3-yarn": ("qwen3", dict(rope_parameters=YARN)),
    "llama": ("llama", {}),
    "llama-llama3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-proportional": ("llama", dict(rope_parameters=PROPORTIONAL)),
    "llama-linear": ("llama", dict(rope_parameters=LINEAR)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral-sliding": ("mistral", dict(sliding_window=N)),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", dict(sliding_window=N, attn_implementation="eager")),
    "granite": ("granite", {}),
    "mixtral": ("mixtral", dict(num_local_experts=2, num_experts_per_tok=1)),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "cohere": ("cohere", dict(logit_scale=1.0)),
    "ernie4_5": ("ernie4_5", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "gpt_neox": ("gpt_neox", dict(num_key_value_heads=4, hidden_size=64)),
    "helium": ("helium", dict(hidden_size=64)),
    "ministral": ("ministral", dict(sliding_window=N)),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "phi": ("phi", {}),
    "seed_oss": ("seed_oss", {}),
    "stablelm": ("stablelm", dict(hidden_size=64)),
    "starcoder2": ("starcoder2", dict(sliding_window=None)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0, 1])),
    "cohere2": ("cohere2", dict(logit_scale=1.0, sliding_window=N, layer_types=[SLIDING, FULL, FULL])),
    "cohere2-window": ("cohere2", dict(logit_scale=1.0, sliding_window=20, layer_types=[SLIDING, FULL, SLIDING])),
    "gemma3": ("gemma3_text", dict(sliding_window=N, layer_types=[SLIDING, FULL, SLIDING])),
    "gemma3-window": ("gemma3_text", dict(sliding_window=20, layer_types=[SLIDING, FULL, SLIDING])),
    "gemma2-window": (
        "gemma2",
        dict(sliding_window=20, layer_types=[FULL, SLIDING, FULL], attn_implementation="eager"),
    ),
    "olmo3": ("olmo3", dict(sliding_window=N, layer_types=[SLIDING, FULL, SLIDING])),
    "olmo3-window": ("olmo3", dict(sliding_window=20, layer_types=[SLIDING, FULL, SLIDING])),
    "exaone4": ("exaone4", dict(sliding_window=20, sliding_window_pattern=2, layer_types=[SLIDING, FULL, SLIDING])),
    "olmoe": ("olmoe", dict(num_experts=2, num_experts_per_tok=1, hidden_size=64)),
    "qwen2_moe": ("qwen2_moe", dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)),
    "granitemoe": ("granitemoe", dict(num_local_experts=2, num_experts_per_tok=1)),
    "phimoe": ("phimoe", dict(num_local_experts=2, num_experts_per_tok=1)),
    "glm4_moe": ("glm4_moe", dict(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, n_group=1)),
    "ernie4_5_moe": ("ernie4_5_moe", dict(moe_num_experts=2, moe_k=1, moe_intermediate_size=16)),
    "nanochat": ("nanochat", {}),
    "persimmon": ("persimmon", dict(num_key_value_heads=4, hidden_size=64)),
    "bitnet": ("bitnet", dict(hidden_size=64)),
    "lfm2": ("lfm2", {}),
    "gpt_oss": (
        "gpt_oss",
        dict(
            sliding_window=20,
            layer_types=[SLIDING, FULL, FULL],
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
            num_local_experts=2,
            num_experts_per_tok=1,
            attn_implementation="eager",
        ),
    ),
    "afmoe": ("afmoe", dict(sliding_window=N)),
    "fathom": ("vanilla", {}),
    "depth_attention": ("depth_attention", {}),
    "uniform_depth": ("uniform_depth", {}),
    "value_residual": ("value_residual", {}),
    "loop": ("loop", {}),
    "loop+depth_attention": ("loop+depth_attention", {}),
}


def model_of(case: str, dtype: torch.dtype = torch.float32, seed: int = 0, **shape):
    """The case's model, with attention far from uniform and logits of about unit scale."""
    kind, changes = {**MODELS, **REFUSED}[case]
    torch.manual_seed(seed)
    if kind in MECHANISMS:
        config = config_of(kind, max_position_embeddings=512, eos_token_id=None, **changes, **shape)
    else:
        config = AutoConfig.for_model(kind, **{**SHAPE, **changes, **shape})
    config._experts_implementation = "eager"  # the only one in float64
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.15 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
            if "lm_head" in name:
                parameter.mul_(0.5)
    return model.to(dtype)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random ids without the special ones."""
    return torch.randint(3, SHAPE["vocab_size"], shape, generator=seeded(seed))


@torch.no_grad()
def cached(model, ids: torch.Tensor, cache, size: int | None = None) -> torch.Tensor:
    """Logits of all positions, through `cache`, in chunks of `size` or the longest."""
    pieces = chunks(ids, cache) if size is None else ids.split(size, dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def cache_of(model, method: str = "freqkv", **options):
    """A cache on the standard schedule."""
    return build_cache(model, method, **{**SCHEDULE, **options})


def double_angles(patch: pytest.MonkeyPatch) -> None:
    """The library's angles are float32, 1e-6 off in logits; in float64 nothing but the method is left to differ."""

    def forward(self, x, position_ids):
        half = torch.arange(self.config.head_dim // 2, dtype=torch.float64)
        angles = position_ids[..., None].double() * self.config.rope_parameters["rope_theta"] ** (-half / len(half))
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    patch.setattr(Qwen3RotaryEmbedding, "forward", forward)
    patch.setattr(LlamaRotaryEmbedding, "forward", forward)
