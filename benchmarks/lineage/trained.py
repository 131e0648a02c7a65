"""Models that learned: by Fathom's own trainer where it fits, by a dozen lines where it does not."""

from __future__ import annotations

import ast
import math
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, one_hot

from checkpoints import NESTED, Checkpoint, seeded
from fathom.corpus.prepare import PrepareOptions, prepare
from fathom.data.batches import Batch, BatchPlan
from fathom.data.shards import TokenDataset
from fathom.models.modeling import FathomForCausalLM
from fathom.recipe import parse_recipe
from fathom.training.build import initialize
from fathom.training.loop import train

HELD_OUT = 0.02


@dataclass(frozen=True)
class Size:
    """How large the zoo is."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    steps: int
    rows: int
    length: int
    text_bytes: int = 4 << 20

    def shape(self) -> dict[str, Any]:
        """The keys of config.json."""
        return dict(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            max_position_embeddings=self.length,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
        )

    def share(self, of_steps: float) -> int:
        """A share of a base's training, in steps."""
        return max(2, round(of_steps * self.steps))


@dataclass
class Workshop:
    """Where the zoo stands, and what it is made from."""

    root: Path
    size: Size
    text: Path | None = None
    other_text: Path | None = None
    losses: dict[str, float] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        """The directory of a model."""
        return self.root / "models" / name

    def read(self, name: str) -> Checkpoint:
        """A model that exists by now."""
        return Checkpoint.read(self.model(name))

    def corpus(self, name: str) -> Path:
        """A corpus, prepared on first use: library, headers, lessons, and library-cut-otherwise."""
        out = self.root / "corpora" / name
        if (out / "index.json").exists():
            return out
        texts = {
            "library": self.library,
            "headers": self.headers,
            "lessons": self.lessons,
            "library-cut-otherwise": self.library,
        }[name]()
        # paragraphs are documents, so that even a little text has some to hold out
        reading = PrepareOptions(file_format="text", separator="", undecodable="replace")
        common = dict(held_out=HELD_OUT, workers=1, overwrite=True, options=reading)
        if name == "library":
            prepare(texts, out, train_tokenizer=self.size.vocab, **common)  # type: ignore[arg-type]
        elif name == "library-cut-otherwise":  # a tokenizer learned from the other text
            foreign = self.root / "corpora" / "foreign-tokenizer"
            prepare(self.headers(), foreign, train_tokenizer=self.size.vocab, **common)  # type: ignore[arg-type]
            prepare(texts, out, tokenizer=str(foreign / "tokenizer"), **common)  # type: ignore[arg-type]
        else:
            prepare(texts, out, tokenizer=str(self.corpus("library") / "tokenizer"), **common)  # type: ignore[arg-type]
        return out

    def library(self) -> list[str]:
        """Text of the bases: the Python standard library, or what --text names."""
        where = self.text or Path(sysconfig.get_path("stdlib"))
        return first_bytes(sorted(where.glob("*") if self.text else where.glob("*.py")), self.size.text_bytes)

    def headers(self) -> list[str]:
        """Other text: the C++ headers that PyTorch ships, or what --other-text names."""
        where = self.other_text or Path(torch.__file__).parent / "include"
        found = sorted(where.glob("*") if self.other_text else where.rglob("*.h"))
        # every seventh, so that all folders have a say
        return first_bytes(found if self.other_text else found[::7], self.size.text_bytes)

    def lessons(self) -> list[str]:
        """Question and answer: signatures of the standard library and the first line of their documentation."""
        folder = self.root / "corpora" / "lessons-text"
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            if lines := list(questions(path)):
                (folder / f"{path.stem}.txt").write_text("\n".join(lines), encoding="utf-8")
        return [str(folder)]

    def plan(self, corpus: str, seed: int = 0) -> BatchPlan:
        """The batches of a corpus, in the order that a seed gives."""
        return BatchPlan(TokenDataset.open(self.corpus(corpus)), self.size.length, self.size.rows, seed)


def first_bytes(paths: Iterable[Path], limit: int) -> list[str]:
    """Files until their sizes reach the limit."""
    chosen, total = [], 0
    for path in (p for p in paths if p.is_file()):
        if total >= limit:
            break
        chosen.append(str(path))
        total += path.stat().st_size
    return chosen


def questions(path: Path) -> Iterator[str]:
    """What each documented function of a module is for."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
            yield f"Question: what does {node.name}({ast.unparse(node.args)}) do?\nAnswer: {said.splitlines()[0]}\n"


def base(
    shop: Workshop,
    name: str,
    seed: int,
    corpus: str = "library",
    steps: float = 1.0,
    lr: float = 3e-3,
    optimiser: str = "adamw",
    start: str | None = None,
    **shape: Any,
) -> None:
    """A run of the trainer: from scratch, or on from the model `start`. Data order does not depend on the seed."""
    size = shop.size
    total = size.share(steps)
    settings = {
        "model": {"from_pretrained": str(shop.model(start))} if start else {**size.shape(), **shape},
        "data": {"directory": str(shop.corpus(corpus)), "sequence_length": size.length, "seed": 0},
        "optim": {"name": optimiser, "lr": lr, "schedule": "cosine", "warmup": 0.1, "floor": 0.1},
        "train": {
            "seed": seed,
            "steps": total,
            "tokens_per_step": size.rows * size.length,
            "micro_batch": size.rows,
            "checkpoint_every": max(total, 1),
            "keep_last": 1,
            "device": "cpu",
        },
        "evaluate": {"every": total, "tokens": 16384, "position_buckets": 4},
        "track": {"display": "none"},
    }
    run = shop.root / "runs" / name
    result = train(parse_recipe(settings), run)
    assert result.model is not None and result.evaluation is not None
    shop.losses[name] = round(result.evaluation.loss, 3)
    (result.model / "loss.json").write_text(str(shop.losses[name]))
    shop.model(name).parent.mkdir(parents=True, exist_ok=True)
    result.model.rename(shop.model(name))
    shutil.rmtree(run)


def descend(parameters: Iterable[nn.Parameter], loss_of: Callable[[int], Tensor], steps: int, lr: float) -> None:
    """AdamW with a tenth of warm-up and a cosine, for what the trainer has no loss for."""
    chosen = [p for p in parameters if p.requires_grad]
    optimiser = torch.optim.AdamW(chosen, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 10)
    for step in range(steps):
        rate = min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = lr * rate
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimiser.step()
        optimiser.zero_grad()


def distilled(shop: Workshop, teacher: str, name: str, seed: int, corpus: str = "library", steps: float = 1.0) -> None:
    """A fresh model that learns the teacher's distribution, not its weights."""
    source = shop.read(teacher)
    guide, plan = source.model().eval(), shop.plan(corpus)
    student = FathomForCausalLM(guide.config)
    initialize(student, seed)

    def loss_of(step: int) -> Tensor:
        ids = plan.batch(step)[0].input_ids  # [rows, T]
        with torch.no_grad():
            wanted = log_softmax(guide(input_ids=ids).logits.flatten(0, 1), -1)
        got = log_softmax(student(input_ids=ids).logits.flatten(0, 1), -1)
        return kl_div(got, wanted, log_target=True, reduction="batchmean")

    descend(student.parameters(), loss_of, shop.size.share(steps), 3e-3)
    source.of(student).write(shop.model(name))


def reinforced(shop: Workshop, start: str, name: str, steps: int = 40, lr: float = 2e-5) -> None:
    """GRPO in small: several answers to a prompt, rewarded by rule (short lines), each against its group's mean."""
    source, plan, group, new = shop.read(start), shop.plan("library", 1), 4, 24
    model = source.model()
    breaks = torch.tensor(line_breaks(source, model.config.vocab_size))
    torch.manual_seed(0)

    def loss_of(step: int) -> Tensor:
        prompts = plan.batch(step)[0].input_ids[:4, :16].repeat_interleave(group, 0)  # [4·group, 16]
        with torch.no_grad():
            rows = model.generate(prompts, max_new_tokens=new, do_sample=True, pad_token_id=0, eos_token_id=None)
        answers = rows[:, 16:]
        reward = breaks[answers].float().mean(1).reshape(-1, group)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        scores = log_softmax(model(input_ids=rows).logits[:, 15:-1], -1)
        chosen = scores.gather(-1, answers[..., None])[..., 0].mean(1)
        return -(advantage.reshape(-1) * chosen).mean()

    descend(model.parameters(), loss_of, steps, lr)
    source.of(model).write(shop.model(name))


def line_breaks(source: Checkpoint, rows: int) -> list[bool]:
    """Which tokens hold a line break."""
    from tokenizers import Tokenizer

    table = Tokenizer.from_file(str(source.tokenizer))
    return ["\n" in (table.decode([row]) if row < table.get_vocab_size() else "") for row in range(rows)]


class Seeing(nn.Module):
    """A decoder behind a projector: pictures become eight embeddings before the text."""

    patches, features = 8, 24

    def __init__(self, decoder: FathomForCausalLM, seed: int) -> None:
        super().__init__()
        self.decoder = decoder
        width, vocab = decoder.config.hidden_size, decoder.config.vocab_size
        self.projector = nn.Sequential(nn.Linear(self.features, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("camera", torch.randn(vocab, self.patches * self.features, generator=seeded(seed)))

    def forward(self, ids: Tensor) -> Tensor:
        """Loss of a text given its picture, which is a projection of the words in it."""
        words = one_hot(ids, self.camera.shape[0]).float().mean(1)  # [B, V]
        pixels = (words @ self.camera).reshape(len(ids), self.patches, self.features)
        seen = torch.cat([self.projector(pixels), self.decoder.model.embed_tokens(ids)], 1)
        logits = self.decoder(inputs_embeds=seen[:, :-1]).logits[:, self.patches - 1 :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def multimodal(shop: Workshop, start: str, name: str, steps: float = 0.15, extra: int = 64) -> None:
    """A vision prefix, 64 more tokens, and a finetune of everything; saved under a nested prefix."""
    source, plan = shop.read(start), shop.plan("lessons")
    model = source.model()
    torch.manual_seed(0)
    model.resize_token_embeddings(model.config.vocab_size + extra)
    seeing = Seeing(model, 0)

    def loss_of(step: int) -> Tensor:
        ids: Tensor = plan.batch(step)[0].input_ids
        return seeing(ids[:, : shop.size.length - Seeing.patches])

    descend(seeing.parameters(), loss_of, shop.size.share(steps), 2e-4)
    out = source.of(model)
    out.config["vocab_size"] += extra
    out.config = {"model_type": "picture_reader", "text_config": out.config}
    out.tensors = {n.replace("model.", NESTED, 1) if n.startswith("model.") else n: t for n, t in out.tensors.items()}
    out.tensors |= {f"model.visual.{n}": t.detach() for n, t in seeing.projector.state_dict().items()}
    out.write(shop.model(name))


def low_rank(shop: Workshop, start: str, name: str, steps: float = 0.15, rank: int = 8, lr: float = 2e-3) -> None:
    """LoRA on queries and values, merged: W + B A."""
    source, plan = shop.read(start), shop.plan("lessons")
    model, draw = source.model(), seeded(0)
    model.requires_grad_(False)
    grown: list[nn.Parameter] = []
    for module in [m for n, m in model.named_modules() if n.endswith(("q_proj", "v_proj"))]:
        down = nn.Parameter(torch.randn(rank, module.in_features, generator=draw) / rank)
        up = nn.Parameter(torch.zeros(module.out_features, rank))
        torch.nn.utils.parametrize.register_parametrization(module, "weight", LowRank(up, down), unsafe=True)
        grown += [up, down]
    descend(grown, lambda step: loss_on(model, plan.batch(step)[0]), shop.size.share(steps), lr)
    for module in [m for n, m in model.named_modules() if n.endswith(("q_proj", "v_proj"))]:
        torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    source.of(model).write(shop.model(name))


class LowRank(nn.Module):
    """W ← W + B A."""

    def __init__(self, up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that is used."""
        return weight + self.up @ self.down


def loss_on(model: nn.Module, batch: Batch) -> Tensor:
    """The language-model loss of a batch."""
    loss: Tensor = model(input_ids=batch.input_ids, labels=batch.labels).loss
    return loss


def upcycled(shop: Workshop, start: str, name: str, split: bool, steps: float = 0.15, experts: int = 4) -> None:
    """A mixture of experts from a dense model: attention copied, feed-forward replicated with noise or split."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    source, plan, draw = shop.read(start), shop.plan("library", 1), seeded(0)
    neurons = source.config["intermediate_size"] // (experts if split else 1)
    config = Qwen3MoeConfig(
        **{k: source.config[k] for k in shop.size.shape()},
        moe_intermediate_size=neurons,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=not split,
        decoder_sparse_step=1,
        output_router_logits=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).float()
    weights = {n: t for n, t in source.tensors.items() if ".mlp." not in n}
    for index in range(source.layers):
        gate, up, down = (source.tensors[f"model.layers.{index}.mlp.{r}_proj.weight"] for r in ("gate", "up", "down"))
        parts = [slice(e * neurons, (e + 1) * neurons) if split else slice(None) for e in range(experts)]
        pairs = torch.stack([torch.cat([gate[p], up[p]]) for p in parts])  # [E, 2·neurons, d]
        outs = torch.stack([down[:, p] * (experts if split else 1) for p in parts])  # [E, d, neurons]
        for role, stack in (("gate_up_proj", pairs), ("down_proj", outs)):
            noise = 0.0 if split else 0.02 * stack.std() * torch.randn(stack.shape, generator=draw)
            weights[f"model.layers.{index}.mlp.experts.{role}"] = stack + noise
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys, missing.unexpected_keys
    descend(model.parameters(), lambda step: loss_on(model, plan.batch(step)[0]), shop.size.share(steps), 5e-4)
    model.save_pretrained(shop.model(name))
    shutil.copyfile(source.tokenizer, shop.model(name) / "tokenizer.json")


def untrained(shop: Workshop, like: str, name: str, seed: int) -> None:
    """The initial weights of a base."""
    source = shop.read(like)
    model = source.model()
    initialize(model, seed)
    source.of(model).write(shop.model(name))
