"""The pondering models' directories, as their authors' loaders write them, against the published rule.

The rule is written out below with an attention of its own. In float32 and with eager attention it is equal to the last
bit, where its sums are in our order.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import fathom
from fathom import FathomForCausalLM
from fathom.checkpoints.export import export
from fathom.checkpoints.families.ponderlm import meaning
from fathom.cli.main import main
from fathom.data.tokenizer import train_bpe
from fathom.errors import ModelError
from fathom.models import FathomConfig
from tests.checkpoints.families.cases import randomise
from tests.tiny import TEXT

D, LAYERS, HEADS, KV, INNER, VOCAB, EPS = 64, 2, 4, 2, 96, 300, 1e-5
WIDTH = D // HEADS
KINDS = {
    "gpt_neox": {
        **{"architectures": ["GPTNeoXForCausalLM"], "hidden_size": D, "intermediate_size": INNER, "hidden_act": "gelu"},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": 64},
        **{"rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": EPS, "use_parallel_residual": True},
    },
    "llama": {
        **{"architectures": ["LlamaForCausalLM"], "hidden_size": D, "intermediate_size": INNER, "hidden_act": "silu"},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "rms_norm_eps": EPS},
        **{"max_position_embeddings": 64, "rope_theta": 10000.0},
    },
    "gpt2": {
        **{"architectures": ["GPT2LMHeadModel"], "n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
        **{"activation_function": "gelu_new", "layer_norm_epsilon": EPS, "n_inner": INNER},
    },
}
PONDER = {"ponderinglm": True, "pondering_steps": 3, "scale_embeds": True, "mutiply_pondering_steps": False}
PONDER |= {"checkpoint_num_layers": 0}
PONDER2 = {"recurrent_model": True, "num_latent_thoughts": 1, "num_jacobi_iterations": 3, "scale_embeds": True}
PONDER2 |= {"random_jacobi_iterations": True, "interpolation": False, "interpolation_use_topk": False}
PONDER2 |= {"output_hidden_states": False, "classifier_dropout": 0}
CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_gpt_neox.GPTNeoXForCausalLM"}}
RELEASED: dict[str, dict[str, object]] = {
    "ponder-pythia": {"model_type": "gpt_neox", **PONDER},
    "ponder-pythia-times": {"model_type": "gpt_neox", **PONDER, "mutiply_pondering_steps": True},
    "ponder-llama": {"model_type": "llama", **PONDER, "pondering_steps": 2, "softmax_temperature": 0.5},
    "ponder-llama-unscaled": {"model_type": "llama", **PONDER, "scale_embeds": False},
    "ponder-gpt2": {"model_type": "gpt2", **PONDER},
    "ponder2-pythia": {"model_type": "gpt_neox", **PONDER2, **CODE},
    "ponder2-llama": {"model_type": "llama", **PONDER2},
    "ponder2-llama-3": {"model_type": "llama", **PONDER2, "num_latent_thoughts": 3, "num_jacobi_iterations": 2},
}
"""By name: the keys of `config.json` beyond the family's."""
every_release = pytest.mark.parametrize("name", RELEASED)
Weights = dict[str, Tensor]
Stack = Callable[[Tensor, Tensor], Tensor]


def config_of(name: str, **changed: object) -> dict[str, object]:
    keys = {**RELEASED[name], **changed}
    shared = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32"}
    shared |= {"tie_word_embeddings": keys["model_type"] == "gpt2", "transformers_version": "4.46.1"}
    config = {**KINDS[str(RELEASED[name]["model_type"])], **shared, **keys}
    return {key: value for key, value in config.items() if value != "absent"}


@cache
def weights_of(kind: str) -> Weights:
    """Random tensors under the family's names."""
    torch.manual_seed(0)
    name = next(name for name in RELEASED if RELEASED[name]["model_type"] == kind)
    family = {key: value for key, value in config_of(name).items() if key not in RELEASED[name]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type=kind, **family))
    randomise(model)
    tensors = {key: x.clone() for key, x in model.state_dict().items()}
    head = tensors.pop("lm_head.weight") if kind != "llama" else None
    if head is not None and kind == "gpt_neox":
        tensors["embed_out.weight"] = head  # the name in its files
    for key in ("gpt_neox.embed_in.weight", "model.embed_tokens.weight", "transformer.wte.weight"):
        if key in tensors:
            tensors[key] /= 4  # so that neither the embeddings nor what is fed back drown the other
    return tensors


def write(folder: Path, name: str, **changed: object) -> Path:
    """A released directory; PonderingPythia's has a tensor that nothing reads."""
    config = config_of(name, **changed)
    tensors = weights_of(str(config["model_type"]))
    if name.startswith("ponder-pythia"):
        tensors["adapter.weight"] = torch.randn(D, 2 * D)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# The published rule.


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over `[B, H, N, D]`, heads side by side again."""
    count = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(count, 1), value.repeat_interleave(count, 1)
    scores = query @ key.mT * WIDTH**-0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def turn(x: Tensor, positions: Tensor, share: float = 1.0) -> Tensor:
    """The first `share` of every head rotated by its token's position."""
    turned = int(WIDTH * share)
    rates = 1.0 / 10000.0 ** (torch.arange(0, turned, 2).float() / turned)
    angles = (positions[:, None].float() * rates).repeat(1, 2)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    moved, rest = x[..., :turned], x[..., turned:]
    first, second = moved.chunk(2, -1)
    return torch.cat([moved * cosine + torch.cat([-second, first], -1) * sine, rest], -1)


def gpt_neox(w: Weights) -> Stack:
    def stack(x: Tensor, positions: Tensor) -> Tensor:
        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, (D,), w[f"gpt_neox.{name}.weight"], w[f"gpt_neox.{name}.bias"], EPS)

        for i in range(LAYERS):

            def line(x: Tensor, part: str, at: str = f"gpt_neox.layers.{i}.") -> Tensor:
                return F.linear(x, w[f"{at}{part}.weight"], w[f"{at}{part}.bias"])

            mixed = line(norm(x, f"layers.{i}.input_layernorm"), "attention.query_key_value")
            heads = mixed.unflatten(-1, (HEADS, 3, WIDTH)).transpose(1, 2)
            query, key, value = (part.squeeze(3) for part in heads.split(1, 3))
            seen = attend(turn(query, positions, 0.25), turn(key, positions, 0.25), value)
            inner = F.gelu(line(norm(x, f"layers.{i}.post_attention_layernorm"), "mlp.dense_h_to_4h"))
            x = line(inner, "mlp.dense_4h_to_h") + line(seen, "attention.dense") + x
        return norm(x, "final_layer_norm")

    return stack


def llama(w: Weights) -> Stack:
    def stack(x: Tensor, positions: Tensor) -> Tensor:
        def norm(x: Tensor, name: str) -> Tensor:
            return w[f"model.{name}.weight"] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))

        for i in range(LAYERS):

            def line(x: Tensor, part: str, at: str = f"model.layers.{i}.") -> Tensor:
                return F.linear(x, w[f"{at}{part}.weight"])

            y = norm(x, f"layers.{i}.input_layernorm")
            heads = (line(y, f"self_attn.{n}_proj").unflatten(-1, (-1, WIDTH)).transpose(1, 2) for n in "qkv")
            query, key, value = heads
            x = x + line(attend(turn(query, positions), turn(key, positions), value), "self_attn.o_proj")
            y = norm(x, f"layers.{i}.post_attention_layernorm")
            x = x + line(F.silu(line(y, "mlp.gate_proj")) * line(y, "mlp.up_proj"), "mlp.down_proj")
        return norm(x, "norm")

    return stack


def gpt2(w: Weights) -> Stack:
    """Positions are added to whatever comes in."""

    def stack(x: Tensor, positions: Tensor) -> Tensor:
        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, (D,), w[f"transformer.{name}.weight"], w[f"transformer.{name}.bias"], EPS)

        x = x + w["transformer.wpe.weight"][positions]
        for i in range(LAYERS):

            def line(x: Tensor, part: str, at: str = f"transformer.h.{i}.") -> Tensor:
                return x @ w[f"{at}{part}.weight"] + w[f"{at}{part}.bias"]

            heads = line(norm(x, f"h.{i}.ln_1"), "attn.c_attn").split(D, -1)
            query, key, value = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in heads)
            x = x + line(attend(query, key, value), "attn.c_proj")
            x = x + line(F.gelu(line(norm(x, f"h.{i}.ln_2"), "mlp.c_fc"), approximate="tanh"), "mlp.c_proj")
        return norm(x, "ln_f")

    return stack


STACKS = {
    "gpt_neox": (gpt_neox, "gpt_neox.embed_in.weight", "embed_out.weight"),
    "llama": (llama, "model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": (gpt2, "transformer.wte.weight", "transformer.wte.weight"),
}


class Published:
    """A released model by its published rule."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **changed: object) -> None:
        self.config = config_of(name, **changed)
        weights = {key: x.to(dtype) for key, x in weights_of(str(self.config["model_type"])).items()}
        make, table, head = STACKS[str(self.config["model_type"])]
        self.stack, self.table, self.head = make(weights), weights[table], weights[head]
        if self.config["scale_embeds"]:
            size = torch.tensor(D, dtype=dtype)
            self.alpha = (2.5 * size if "interpolation" in self.config else size).sqrt()
        else:
            self.alpha = torch.ones((), dtype=dtype)

    def logits(self, ids: Tensor) -> Tensor:
        """`[B, T, V]`"""
        embedded = self.table[ids] * self.alpha
        if "interpolation" in self.config:
            stages = self.thoughts(embedded)
            return self.latent(stages)[-1] @ self.head.T
        positions = torch.arange(ids.shape[1])
        steps = int(str(self.config["pondering_steps"]))
        x = embedded * steps if self.config["mutiply_pondering_steps"] else embedded
        temperature = float(str(self.config.get("softmax_temperature", 1)))
        for _ in range(steps):
            said = (self.stack(x, positions) @ self.head.T / temperature).softmax(-1)
            x = x + said @ (self.table * self.alpha)
        return self.stack(x, positions) @ self.head.T

    def latent(self, stages: list[Tensor]) -> list[Tensor]:
        """The stack's outputs for the stages of every token, which stand next to each other."""
        count, length = len(stages), stages[0].shape[1]
        x = torch.stack(stages, 2).flatten(1, 2)  # [B, T stages, D]
        hidden = self.stack(x, torch.arange(length).repeat_interleave(count))
        return list(hidden.unflatten(1, (length, count)).unbind(2))

    def thoughts(self, embedded: Tensor) -> list[Tensor]:
        """The token's stage and those of its thoughts, grown one by one and refined in rounds."""
        stages = [embedded]
        for _ in range(int(str(self.config["num_latent_thoughts"]))):
            stages = [embedded, *self.latent(stages)]
        for _ in range(int(str(self.config["num_jacobi_iterations"]))):
            stages = [embedded, *self.latent(stages)[:-1]]
        return stages

    def continued(self, ids: Tensor, count: int) -> list[int]:
        """Greedy tokens after a prompt `[1, T]`, as the published code decodes with a cache: the prompt's slots stay as
        the rounds left them, and those of every new token follow one after another."""
        stages, said = self.thoughts(self.table[ids] * self.alpha), []
        slots, positions = torch.stack(stages, 2).flatten(1, 2), torch.arange(ids.shape[1])
        positions = positions.repeat_interleave(len(stages))
        hidden = self.stack(slots, positions)[:, -1:]
        for at in range(ids.shape[1], ids.shape[1] + count):
            said.append(int((hidden[0, -1] @ self.head.T).argmax()))
            x = self.table[torch.tensor([said[-1:]])] * self.alpha
            for _ in stages:
                slots, positions = torch.cat([slots, x], 1), torch.cat([positions, torch.tensor([at])])
                x = hidden = self.stack(slots, positions)[:, -1:]
        return said


def ids_of(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def opened(folder: Path, name: str, dtype: torch.dtype = torch.float32, **keys: object) -> FathomForCausalLM:
    model = FathomForCausalLM.from_pretrained(write(folder, name), dtype=dtype, attn_implementation="eager", **keys)
    return model.eval()


@every_release
def test_logits_are_the_published_rule(name: str, tmp_path: Path) -> None:
    """Equal to the last bit, but for GPT-2, whose class adds positions in another order. The vanilla reading is far."""
    ids = ids_of(2, 11)
    with torch.no_grad():
        rule = Published(name).logits(ids)
        off = (opened(tmp_path, name)(ids).logits - rule).abs().max()
        vanilla = opened(tmp_path, name, recurrence="once", embedding_scale=1.0)(ids).logits
    assert off <= (2e-6 if name == "ponder-gpt2" else 0.0)
    assert (vanilla - rule).abs().max() > 0.5


@pytest.mark.quick("ponder-pythia-times", "ponder2-pythia")
@pytest.mark.parametrize("name", ["ponder-pythia-times", "ponder-gpt2", "ponder2-pythia", "ponder2-llama-3"])
def test_cached_greedy_tokens_are_the_uncached_ones(name: str, tmp_path: Path) -> None:
    """`ponder2` under `prefill: exact`, where both are the decoded numbers."""
    options = {"recurrence_options": {"prefill": "exact"}} if name.startswith("ponder2") else {}
    model, ids = opened(tmp_path, name, torch.float64, **options), ids_of(1, 7)
    said = [model.generate(ids, max_new_tokens=8, use_cache=cached, eos_token_id=None) for cached in (True, False)]
    assert torch.equal(*said)


@pytest.mark.parametrize("name", ["ponder2-llama", "ponder2-llama-3"])
def test_generated_tokens_are_those_of_the_published_decoding(name: str, tmp_path: Path) -> None:
    """With its own number of rounds for the prompt; with none, the prompt's thoughts are others."""
    model, ids = opened(tmp_path, name), ids_of(1, 7)
    with torch.no_grad():
        said = model.generate(ids, max_new_tokens=8, eos_token_id=None)[0, 7:].tolist()
        assert said == Published(name).continued(ids, 8)
        assert said != Published(name, num_jacobi_iterations=0).continued(ids, 8)


@pytest.mark.quick("ponder-gpt2", "ponder2-llama")
@pytest.mark.parametrize("name", ["ponder-pythia-times", "ponder-gpt2", "ponder2-llama"])
def test_the_tools_take_a_released_directory(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It loads, generates, has a perplexity, and comes back from an export with the same logits."""
    tokenizer = train_bpe(TEXT * 4, VOCAB)
    (tmp_path / "theirs").mkdir()
    tokenizer.save_pretrained(write(tmp_path / "theirs", name))
    model, tokenizer = fathom.load(tmp_path / "theirs", device="cpu")
    assert model.config.recurrence == name.partition("-")[0]
    sampling = fathom.Sampling(max_new_tokens=4, temperature=0)
    assert fathom.generate(model, tokenizer, TEXT[0], sampling).text
    (tmp_path / "text.txt").write_text(TEXT[0])
    assert main(["evaluate", str(tmp_path / "theirs"), "--perplexity", str(tmp_path / "text.txt"), "--json"]) == 0
    assert '"perplexity"' in capsys.readouterr().out
    export(model, tmp_path / "ours", tokenizer)
    assert not (
        json.loads((tmp_path / "ours" / "config.json").read_text()).keys() & RELEASED[name].keys() - {"model_type"}
    )
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval(), ids_of(1, 9)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(ModelError, match="recurrence"):
        export(model, tmp_path / "native", tokenizer, form="native")


@pytest.mark.parametrize(
    ("kind", "keys", "rounds"),
    [
        ("gpt_neox", {}, ([2, 4], 3, 3)),
        ("llama", {"num_jacobi_iterations": 5}, ([2, 3], 5, 5)),
        ("llama", {"random_jacobi_iterations": False, "num_jacobi_iterations": 2}, ([2, 2], 2, 2)),
        ("llama", {"num_jacobi_iterations": "absent"}, ([2, 3], 3, 3)),
    ],
)
def test_rounds_are_those_of_the_public_classes(kind: str, keys: dict[str, object], rounds: object) -> None:
    name = "ponder2-pythia" if kind == "gpt_neox" else "ponder2-llama"
    values = meaning(config_of(name, **keys), D)["recurrence_options"]
    assert (values["jacobi_train"], values["jacobi_eval"], values["jacobi_prefill"]) == rounds


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        (
            "ponder2-pythia",
            {"recurrent_model": False},
            "recurrent_model is not true.* plain gpt_neox.*num_latent_thoughts",
        ),
        ("ponder2-llama", {"interpolation": True}, "interpolation=true"),
        ("ponder2-llama", {"interpolation": "absent"}, "interpolation=true"),
        ("ponder2-llama", {"num_latent_thoughts": 0}, "num_latent_thoughts must be"),
        ("ponder2-llama", {"num_jacobi_iterations": -1}, "jacobi_eval"),
        ("ponder2-llama", {"num_latent_pauses": 2}, "num_latent_pauses=2"),
        ("ponder2-llama", {"auto_map": {"AutoModel": "modeling_llama_loop.LlamaModel"}}, "modeling_llama_loop"),
        ("ponder2-llama", {"pondering_steps": 2}, "pondering_steps is a key of PonderLM and num_latent"),
        ("ponder-gpt2", {**dict.fromkeys(PONDER, "absent"), **PONDER2}, "gpt2 with keys of PonderLM-2"),
        ("ponder2-llama", {"model_type": "qwen2"}, "qwen2 with keys of PonderLM-2"),
        ("ponder2-llama", {"use_depth_attention": True, "depth_attention_stride": 1}, "num_latent_thoughts=1"),
        ("ponder-pythia", {"ponderinglm": False}, "ponderinglm is not true"),
        ("ponder-gpt2", {"ponderinglm": "absent"}, "ponderinglm or recurrent_model is not true"),
        ("ponder-llama", {"pondering_steps": "absent"}, "pondering_steps must be"),
        ("ponder-pythia", {"softmax_temperature": 0.5}, "softmax_temperature=0.5"),
        ("ponder-llama", {"residual_pondering": True}, "residual_pondering=True"),
        (
            "ponder-llama",
            {**dict.fromkeys(PONDER, "absent"), "scale_embeds": True},
            "scale_embeds=True needs another key",
        ),
        (
            "ponder-pythia",
            {**dict.fromkeys(PONDER, "absent"), "recurrent_model": True},
            "recurrent_model=True needs another key",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    name: str, changed: dict[str, object], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name, **changed)))
    with pytest.raises(ValueError, match=says) as caught:
        FathomConfig.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_gpt2_may_say_it_under_the_name_that_its_class_reads(tmp_path: Path) -> None:
    config = config_of("ponder-gpt2", ponderinglm="absent", recurrent_model=True)
    assert meaning(config, D) == meaning(config_of("ponder-gpt2"), D)


def test_a_plain_model_stays_one(tmp_path: Path) -> None:
    """Keys that are off, as those of Depth-Attention's baselines, mean nothing, and only a pondering model may have the
    unread tensor."""
    off = {**dict.fromkeys(PONDER, False), "checkpoint_num_layers": 0, "recurrent_model": False}
    assert (
        FathomForCausalLM.from_pretrained(write(tmp_path, "ponder-llama-unscaled", **off)).config.recurrence == "once"
    )
    with pytest.raises(ValueError, match=r"adapter\.weight"):
        FathomForCausalLM.from_pretrained(write(tmp_path, "ponder-pythia", **off))
