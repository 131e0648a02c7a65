"""Residuals of released models: bit for bit against the models' own layers in transformers, and against equations."""

import math
import random
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from fathom.checkpoints.export import export
from fathom.models import FathomForCausalLM
from fathom.models.registry import MECHANISMS
from fathom.models.residuals import released_streams
from fathom.models.residuals.released_streams import FORMS, GATED
from tests.tiny import seeded

from .cases import build, config_of, tokens
from .oracle import oracle_of, truth

STREAMS, WIDTH, LAYERS = 4, 32, 4
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
OPTIONS = {
    **{form: ("hyper_connections", {"form": form, "streams": STREAMS}) for form in (*FORMS, GATED)},
    "inkling2": ("attention_residuals", {"variant": "inkling2", "block_size": 4}),
    "kimi_k3": ("attention_residuals", {"block_size": 4}),  # in the model 24
}
SHIPPED = {  # by our name: transformers' modules for a sub-layer and for the end, and its layers
    "deepseek_v4": ("deepseek_v4", "DeepseekV4HyperConnection", "DeepseekV4HyperHead", ["DeepseekV4DecoderLayer"] * 2),
    "glm5_next": (
        "glm5_next",
        "Glm5NextTextHyperConnection",
        "Glm5NextTextHyperHead",
        ["Glm5NextTextDecoderLayer"] * 2,
    ),
    "hy_v4": ("hy_v4", "HYV4HyperConnection", "HYV4HyperHead", ["HYV4DecoderLayer"] * 2),
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpTextGatedResidual", None, ["Qwen4ExpTextDecoderLayer"] * 2),
    "inkling2": (
        "inkling2",
        "Inkling2BlockAttentionResidual",
        None,
        ["Inkling2SlidingDecoderLayer", "Inkling2FullDecoderLayer"],
    ),
}
THEIRS = {  # their parameters' names by ours
    "projection.weight": ("fn", "hc_fn"),
    "shift": ("base", "hc_base"),
    "scale": ("scale", "hc_scale"),
    "norm_weight": ("hc_norm.weight",),
    "down.weight": ("input_mix_weight_down.weight",),
    "up.weight": ("input_mix_weight_up.weight",),
    "inject.weight": ("block_inject_weight.weight",),
    "query": ("query",),
}


def attend(q, k=None, v=None):
    """Stands for attention: any function of its three inputs that makes the same bits of the same bits."""
    return torch.sin(3 * q) + (torch.zeros_like(q) if k is None else torch.cos(2 * k) * v)


def config_for(name):
    residual, options = OPTIONS[name]
    return config_of(residual, residual_options=options, num_hidden_layers=LAYERS, **SLIDING)


def ours_of(name, dtype, seed=0):
    """Every read of a model, with random parameters."""
    config = config_for(name)
    modules = [MECHANISMS[config.residual].build(config, sublayer).eval() for sublayer in range(2 * LAYERS + 1)]
    torch.manual_seed(seed)
    for module in modules:
        for which, parameter in module.named_parameters():
            nn.init.normal_(parameter, std=0.3)
            if "gains" in which:
                nn.init.ones_(parameter)  # as Inkling-2's norms, which are left out
        module.to(dtype)
    return modules


@torch.no_grad()
def ours(modules, x):
    """What is read before every sub-layer, and before the final norm."""
    state, seen = modules[0].begin(x), []
    for sublayer, module in enumerate(modules):
        read, state, context = module.read(state)
        ways = read if isinstance(read, tuple) else (read,)
        seen += ways
        if sublayer < len(modules) - 1:
            update = (
                attend(*module.gained(ways) if len(ways) == 3 else ways) if sublayer % 2 == 0 else torch.cos(ways[0])
            )
            state = module.write(state, update, context)
    return seen


def shipped(name, dtype, modules):
    """The model's own layers around the same sub-layers, and its own last read; and what their sub-layers get."""
    package, site, head, layers = SHIPPED[name]
    code = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    sizes = {"hc_mult": STREAMS, "hc_count": STREAMS, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "hc_magnitude": 2.0}
    rank = getattr(getattr(modules[0], "down", None), "out_features", 0)
    shape = SimpleNamespace(
        _attn_implementation="eager", hidden_size=WIDTH, rms_norm_eps=1e-6, hc_lowrank=rank, **sizes
    )
    seen = []

    def make(kind, ours, *arguments, **keys):
        module = getattr(code, kind)(*arguments, **keys)
        given = dict(ours.named_parameters())
        for name, own in THEIRS.items():
            for parameter in (dict(module.named_parameters()).get(o) for o in own):
                if name in given and parameter is not None:
                    parameter.data = given[name].data.clone().reshape(parameter.shape)
        return module

    def stub(*given, hidden_states=None, key_hidden_states=None, value_hidden_states=None, **_):
        others = [x for x in (key_hidden_states, value_hidden_states) if x is not None]
        ways = (given[0] if given else hidden_states, *others)
        seen.extend(ways)
        made = attend(*ways)
        return (made, None, None) if package in ("glm5_next", "hy_v4") else (made, None)

    def feed(x, **_):
        seen.append(x)
        return torch.cos(x)

    def layer(index):
        kind = getattr(code, layers[index % 2])
        made = kind.__new__(kind)
        nn.Module.__init__(made)
        names = ("input_layernorm", "q_input_layernorm", "k_input_layernorm", "v_input_layernorm")
        for norm in (*names, "post_attention_layernorm"):
            setattr(made, norm, nn.Identity())
        made.__dict__.update(self_attn=stub, mlp=feed, ple=None, layer_type="full", block_type="full")
        made.__dict__.update({f"post_{part}_convolution": lambda x, **_: x for part in ("attention", "mlp")})
        attn, mlp = modules[2 * index], modules[2 * index + 1]
        if name == "inkling2":
            made.is_block_boundary = index % 2 == 0
            queries = {"num_queries": 3} if index % 2 else {}
            made.attention_input = make(site, attn, shape, **queries) if index else None
            made.mlp_input = make(site, mlp, shape)
            return made
        keys = ("attn_hyper_connection", "mlp_hyper_connection") if name == GATED else ("attn_hc", "ffn_hc")
        for key, ours in zip(keys, (attn, mlp), strict=True):
            setattr(made, key, make(site, ours, shape))
        return made

    if name == GATED:
        last = make(site, modules[-1], shape, use_combine=False)
    elif name == "glm5_next":
        last = getattr(code, head)()
    else:
        last = make(head or site, modules[-1], shape)
    return [layer(index).to(dtype) for index in range(LAYERS)], last.to(dtype), seen


@torch.no_grad()
def theirs(name, dtype, modules, x):
    """As `ours`, by the model's code; the loops over its layers are those of its own model."""
    layers, last, seen = shipped(name, dtype, modules)
    if name == "inkling2":
        hidden, blocks = x, x.new_zeros(*x.shape[:-1], 0, x.shape[-1])
        for layer in layers:
            made = layer(hidden, blocks)
            if layer.is_block_boundary:
                blocks = torch.cat([blocks, hidden.unsqueeze(-2)], dim=-2)
            hidden = made
        return [*seen, last(blocks, hidden)[0].to(dtype)]
    streams = x.repeat(1, 1, STREAMS) if name == GATED else x.unsqueeze(2).expand(-1, -1, STREAMS, -1).contiguous()
    for layer in layers:
        streams = layer(streams, **({"position_embeddings": None} if name == GATED else {}))
        streams = streams[0] if isinstance(streams, tuple) else streams
    return [*seen, last(streams)]


def largest(name, dtype):
    """The largest difference between what the two read, and the largest number read."""
    modules, x = ours_of(name, dtype), torch.randn(2, 5, WIDTH, generator=seeded(1)).to(dtype)
    pairs = list(zip(ours(modules, x), theirs(name, dtype, modules, x), strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs), max(
        b.abs().max().item() for _, b in pairs
    )


def table() -> str:
    """The rows of the page: each released module, and how far ours is from it."""
    lines = ["| option | transformers' module | float32 | bfloat16 |", "| --- | --- | ---: | ---: |"]
    for name, (package, site, _, _) in SHIPPED.items():
        key = "variant" if name == "inkling2" else "form"
        cells = []
        for dtype in (torch.float32, torch.bfloat16):
            off, size = largest(name, dtype)
            cells.append("0" if off == 0 else f"≤ 2^{math.ceil(math.log2(off / size))}")
        lines.append(f"| `{key}: {name}` | `{package}`, `{site}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_read_is_the_released_models_own(name):
    off, size = largest(name, torch.float32)
    by_attention = name == "inkling2" and version("transformers") >= "5.24"  # its class sums in another order there
    assert off <= (1e-6 * size if by_attention else 0), "to the last bit"
    off, size = largest(name, torch.bfloat16)
    assert off <= size * 2**-6


@pytest.mark.parametrize("name", ["deepseek_v4", "glm5_next"])
def test_a_mix_that_is_not_transposed_is_seen(name, monkeypatch):
    """The negative control: one matrix the other way round."""
    monkeypatch.setattr(released_streams, "balanced", lambda *a, own=released_streams.balanced: own(*a).mT)
    assert largest(name, torch.float32)[0] > 1e-2


def single_pass(modules, x):
    """DeepSeek-V4.1's single pass in float64, restated from NVIDIA-NeMo/Automodel, deepseek_v41/layers.py at a6475cb:
    `hc_collapse` with the mix of the site before, the first one-hot, and `hc_expand`."""
    streams, mix, seen = x.unsqueeze(2).expand(-1, -1, STREAMS, -1), torch.eye(STREAMS)[0].double().expand(2, 5, -1), []
    for sublayer, module in enumerate(modules):
        seen.append((mix.unsqueeze(-1) * streams).sum(2))
        if sublayer == len(modules) - 1:
            return seen
        flat = streams.flatten(2)
        made = flat @ module.projection.weight.T / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        sizes = torch.tensor([STREAMS, STREAMS, STREAMS**2])
        logits = module.shift + made * module.scale.repeat_interleave(sizes)
        pre, post = logits[..., :STREAMS].sigmoid() + 1e-6, 2 * logits[..., STREAMS : 2 * STREAMS].sigmoid()
        comb = logits[..., 2 * STREAMS :].unflatten(-1, (STREAMS, STREAMS)).softmax(-1) + 1e-6
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        update = attend(seen[-1]) if sublayer % 2 == 0 else torch.cos(seen[-1])
        mixed = (comb.unsqueeze(-1) * streams.unsqueeze(-2)).sum(2)  # over the streams that are read
        streams, mix = post.unsqueeze(-1) * update.unsqueeze(-2) + mixed, pre


def kimi(modules, x):
    """Kimi K3's attention residuals in float64, restated from NVIDIA-NeMo/Automodel, kimi_k3/model.py at 36044ad:
    `_forward_attn_residual` and `_apply_attn_res`, with blocks of two layers."""
    prefix, blocks, seen = x, [], []

    def mixed(module):
        values = torch.stack([*blocks, prefix], 2)
        keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)
        weights = (keys * (module.norm.weight * module.pseudo_query)).sum(-1).softmax(-1)
        return torch.matmul(weights.unsqueeze(2), values).squeeze(2)

    for layer in range(LAYERS):
        hidden = mixed(modules[2 * layer]) if blocks else x
        seen.append(hidden)
        begins = layer % 2 == 0
        blocks += [prefix] if begins else []
        prefix = attend(hidden) if begins else prefix + attend(hidden)
        seen.append(mixed(modules[2 * layer + 1]))
        prefix = prefix + torch.cos(seen[-1])
    return [*seen, mixed(modules[-1])]


def test_single_pass_and_kimi_are_their_public_codes():
    """transformers has neither: in float64 against the equations of the code that trains them."""
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    for name, restated in (("deepseek_v41", single_pass), ("kimi_k3", kimi)):
        modules = ours_of(name, torch.float64)
        with torch.no_grad():
            found, expected = ours(modules, x), restated(modules, x)
        assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) < 1e-11
    modules, other = ours_of("deepseek_v41", torch.float64), ours_of("deepseek_v4", torch.float64)
    for module, own in zip(other[:-1], modules, strict=False):
        module.load_state_dict(own.state_dict())
    assert (ours(other, x)[0] - ours(modules, x)[0]).abs().max() > 1e-2, "whose sub-layers read with their own weights"


def drawn(seed):
    """A random small model with one of the released residuals."""
    rng = random.Random(seed)
    name = sorted(OPTIONS)[seed % len(OPTIONS)]
    residual, options = OPTIONS[name]
    if residual == "hyper_connections":
        options = options | {"streams": rng.randint(1, 5), "sinkhorn_iterations": rng.choice((1, 3, 20))}
        options |= {"rank": rng.randint(1, 9)} if name == GATED else {}
    else:
        options = options | {"block_size": rng.randint(1, 6), "queries": rng.choice((1, 3))}
    layers = rng.randint(1, 3)
    kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    return config_of(
        residual,
        residual_options=options,
        num_hidden_layers=layers,
        **SLIDING | {"layer_types": kinds, "sliding_window": rng.randint(1, 5)},
        **({"recurrence": "loop", "recurrence_options": {"trips": 2}} if rng.random() < 0.3 else {}),
    )


@torch.no_grad()
def far(seed):
    model, ids = build(drawn(seed), seed, torch.float64), tokens(1, 3, seed=seed)
    expected = truth(oracle_of(model), ids)
    return (model(ids).logits - expected).abs().max().item() / max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("seed", range(len(OPTIONS)))
def test_a_random_model_is_its_equations(seed):
    assert far(seed) <= 1e-11


@pytest.mark.slow
def test_a_thousand_random_models_are_their_equations():
    worst = max((far(seed), seed) for seed in range(1000))
    assert worst[0] <= 1e-11, worst


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_trained_exported_and_decoded(name, tmp_path):
    """A hundred steps lower the loss; the export opens without Fathom; tokens one by one are what all at once are."""
    torch.manual_seed(0)
    model, ids = FathomForCausalLM(config_for(name)).train(), tokens(8, 24)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(100):
        model.set_step(step, 100)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and all(map(math.isfinite, losses))
    model.eval()
    place = export(model, tmp_path / "out")
    alone = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HOME": str(tmp_path / "hub")}
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        f"m = A.from_pretrained({str(place)!r}, trust_remote_code=True).eval();"
        "torch.set_grad_enabled(False);"
        f"torch.save(m(torch.tensor({ids[:1].tolist()})).logits, {str(tmp_path / 'logits')!r});"
        "assert 'fathom' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=alone)
    with torch.no_grad():
        whole, cache = model(ids[:1]).logits, DynamicCache(config=model.config)
        parts = [model(token, past_key_values=cache).logits for token in ids[:1].split(1, 1)]
    assert torch.equal(torch.load(tmp_path / "logits", weights_only=True), whole)
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-5 * whole.abs().max()
