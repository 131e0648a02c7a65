"""Nanbeige's switches, held to a model of transformers that has each visited layer as one of its own.

Keys, values and depth attention are shared or mixed in its attention function, where Nanbeige's code has them: after
positions.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom import FathomForCausalLM

SHAPE = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-6},
    **{"num_hidden_layers": 6, "tie_word_embeddings": False},
}
NORM, STACK = "the final norm", [0, 1, 2, 3, 4, 5]
SPLIT, SHARE, DEPTH = ({key: True} for key in ("enable_double_loop_split", "loop_share_kv", "enable_depth_attention"))
MIDDLE = [0, 1, *[2, 3] * 4, 4, 5]
CASES = [  # the switches, and what runs in which order
    ({}, STACK),
    ({"num_loops": 2}, [*STACK, NORM, *STACK]),
    ({"num_loops": 2, "skip_loop_final_norm": True}, STACK * 2),
    ({"loop_loss_weights": [0.2, 0.1]}, [*STACK, NORM, *STACK, NORM, *STACK]),
    (SPLIT, [0, *[1, 2, 3] * 3, 4, 5]),
    ({**SPLIT, "loop_middle_layers": 6, "num_loops": 5}, STACK * 2),
    ({**SPLIT, **SHARE, "loop_middle_layers": 2}, MIDDLE),
    ({"qk_layernorm": True}, STACK),
    (DEPTH, STACK),
    ({**DEPTH, "depth_attention_stride": 2, "num_loops": 2}, [*STACK, NORM, *STACK]),
]


def model_of(switches):
    """Six layers of transformers, every weight random."""
    torch.manual_seed(0)
    qwen = switches.get("qk_layernorm")
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)) if qwen else LlamaForCausalLM(LlamaConfig(**SHAPE))
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape)
    return model.eval()


def saved(directory, model, switches):
    """A directory as Nanbeige's are."""
    tensors = {
        n.replace("q_norm", "q_layernorm").replace("k_norm", "k_layernorm"): p for n, p in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "nanbeige", **SHAPE, **switches}))
    return directory


class Between(nn.Module):
    """A norm in the place of a layer."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, **_):
        return self.norm(x)


def attention(switches):
    """Attention that knows of the visits before: one function for one forward pass."""
    ordinary, first, sources = ALL_ATTENTION_FUNCTIONS["sdpa"], {}, []

    def attend(module, query, key, value, mask, **further):
        layer = module.layer_idx
        if switches.get("loop_share_kv"):
            key, value = first.setdefault(layer, (key, value))
        if switches.get("enable_depth_attention"):
            keys, values = (torch.stack(x) for x in zip(*sources, (key, value), strict=True))
            mean = query.unflatten(1, (2, 2)).mean(2)
            value = (((mean * keys).sum(-1, keepdim=True) / 8**0.5).softmax(0) * values).sum(0)
            if layer % switches.get("depth_attention_stride", 3) == 0:
                sources.append((key, value))
        return ordinary(module, query, key, value, mask, **further)

    return attend


def expected(model, switches, order, ids, monkeypatch):
    """Logits of the layers in this order."""
    layers, between = model.model.layers, Between(model.model.norm)
    model.model.layers = nn.ModuleList(between if i is NORM else layers[i] for i in order)
    model.config.num_hidden_layers = len(order)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention(switches))
        return model(ids, use_cache=False).logits


IDS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("switches", "order"), CASES, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_logits_are_those_of_the_visited_layers(switches, order, tmp_path, monkeypatch):
    model = model_of(switches)
    ours = FathomForCausalLM.from_pretrained(saved(tmp_path, model, switches)).eval()
    with torch.no_grad():
        found = ours(IDS).logits
    off = (found - expected(model, switches, order, IDS, monkeypatch)).abs().max()
    assert off < 2e-5 if switches.get("enable_depth_attention") else off == 0


def test_another_order_is_seen(tmp_path, monkeypatch):
    """The negative control: one visit more, or keys and values of each visit."""
    switches = {**SPLIT, **SHARE, "loop_middle_layers": 2}
    ours = FathomForCausalLM.from_pretrained(saved(tmp_path, model_of(switches), switches)).eval()
    with torch.no_grad():
        found = ours(IDS).logits
    for other, order in ((switches, [0, 1, 2, 3, *MIDDLE[2:]]), (SPLIT, MIDDLE)):
        assert (found - expected(model_of(switches), other, order, IDS, monkeypatch)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"enable_hyper_connection": True}, "enable_hyper_connection=True: Fathom does not have hyper-connections"),
        ({"emb_neighbor_num": 3}, "emb_neighbor_num=3: Fathom does not have embeddings of n-grams"),
        ({"enable_new_thing": True}, "enable_new_thing=true: Fathom does not know this key of nanbeige models"),
        ({**SPLIT, **DEPTH}, "enable_depth_attention with enable_double_loop_split"),
        ({"is_causal": False}, "is_causal=false: Fathom's decoder is causal"),
        ({"my_mechanism": 2}, "my_mechanism=2: Fathom does not know this key of nanbeige models"),
        ({"sliding_window": 4}, "sliding_window=4: Fathom does not know what this model"),
        (SHARE, "loop_share_kv=True needs enable_double_loop_split=True"),
        ({**SPLIT, "loop_middle_layers": 4}, "loop_middle_layers must divide num_hidden_layers=6, got 4"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(switches, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        FathomForCausalLM.from_pretrained(saved(tmp_path, model_of({}), switches))


def test_parameters_of_switches_that_are_off_are_ignored(tmp_path):
    """Nanbeige's own class saves them all."""
    off = {"mhc_sinkhorn_iterations": 20, "ngram_fused_mode": "average", "depth_attention_static_anchor_once": True}
    config = FathomForCausalLM.from_pretrained(saved(tmp_path, model_of({}), off)).config
    assert (config.mixer, config.residual, config.recurrence) == ("none", "plain", "once")
