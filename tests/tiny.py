"""Tiny things that many tests need: a corpus of two domains, recipes whose steps take milliseconds, and a model with a
tokenizer, exported in a second."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedTokenizerFast

from fathom.checkpoints.export import export
from fathom.corpus.prepare import prepare
from fathom.data.shards import ShardWriter, file_crc32, read_index, shard_files, targets_file, write_index
from fathom.data.targets import write_targets
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.recipe import Recipe, parse_recipe

WORDS = "the,depth,of,a,river,is,measured,with,rope,and,lead,or,with,sound,in,fathoms,and,in,feet"
TEXT = [
    "To fathom a thing is to measure its depth, and after much thought to understand it.",
    "The sailors let the lead fall into the dark water, and called the depth aloud.",
    "Ein Faden misst sechs Fuß; wer Tiefen lotet, zählt die Knoten. 深さを測る。",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def seeded(seed: int) -> torch.Generator:
    """A generator of the device that tests run on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def make_corpus(folder: Path) -> Path:
    """Rivers and seas, a fifth of them held out."""
    chance = random.Random(0)
    inputs = []
    for domain, count in (("rivers", 120), ("seas", 60)):
        texts = (" ".join(chance.choices(WORDS.split(","), k=chance.randint(5, 80))) for _ in range(count))
        path = folder / f"{domain}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts)))
        inputs.append(f"{domain}={path}")
    prepare(inputs, folder / "out", train_tokenizer=300, held_out=0.2, workers=1)
    return folder / "out"


def make_conversations(corpus: Path, folder: Path, longest: int = 32) -> Path:
    """Random conversations of a corpus's tokenizer, with bits; `SPLIT.json` says what was written."""
    chance = np.random.default_rng(0)
    index = read_index(corpus)
    shutil.copytree(corpus / "tokenizer", folder / "tokenizer")
    splits: dict[str, dict[str, object]] = {}
    targets: dict[str, int] = {}
    for split, count in (("train", 60), ("val", 13)):
        made = []
        for length in [2, longest, *chance.integers(3, longest, count).tolist()]:
            ids = [*chance.integers(4, 290, length - 1).tolist(), index.eos_token_id]
            made.append((ids, [bool(bit) for bit in (*chance.integers(0, 2, length - 1), 1)]))
        writer = ShardWriter(folder, split, "talk", np.dtype(index.dtype), 1 << 40)
        sizes = np.array([len(ids) for ids, _ in made], np.int64)
        writer.append(np.concatenate([np.array(ids, writer.dtype) for ids, _ in made]), sizes, 3 * sizes)
        file = shard_files(folder, split, "talk", 0)[0]
        write_targets(file, np.concatenate([bits for _, bits in made]))
        targets[f"{split}/talk/00000.targets"] = file_crc32(targets_file(file))
        splits[split] = {"talk": writer.shards}
        (folder / f"{split}.json").write_text(json.dumps(made))
    write_index(folder, replace(index, splits=splits, targets_crc32=targets))
    return folder


def shape(**fields: object) -> dict[str, object]:
    """A model block of a few thousand parameters."""
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 304,
        "max_position_embeddings": 32,
        "initializer_range": 0.05,
        **fields,
    }


def tiny_recipe(corpus: Path, *overrides: str) -> Recipe:
    """Two layers with depth attention, eight steps."""
    values = {
        "model": shape(mixer="depth_attention"),
        "data": {"directory": str(corpus), "sequence_length": 32, "packing": "documents"},
        "optim": {"lr": 1e-2, "warmup": 0.1},
        "train": {"steps": 8, "tokens_per_step": 256, "micro_batch": 4, "checkpoint_every": 4, "log_every": 2},
        "evaluate": {"every": 4, "tokens": 256, "position_buckets": 4},
        "track": {"display": "none"},
    }
    return parse_recipe(values, ("train.export=false", "train.device=cpu", *overrides))


def comparable_recipe(corpus: Path) -> Recipe:
    """Four layers, twelve steps: enough for arms to differ."""
    values = {
        "model": shape(num_hidden_layers=4),
        "data": {"directory": str(corpus), "sequence_length": 32},
        "optim": {"lr": 1e-2, "warmup": 0.1},
        "train": {"steps": 12, "tokens_per_step": 256, "micro_batch": 8, "checkpoint_every": 12, "log_every": 2},
        "evaluate": {"every": 4, "tokens": 1000, "position_buckets": 4},
    }
    return parse_recipe(values, ("train.export=false", "train.device=cpu"))


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the text above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML if chat else None
    return fast


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's of old: a letter is a token, with or without a blank before it; decoding strips a leading blank."""
    letters = "abcdefghijklmnopqrstuvwxyzTE.,\n"
    pieces = ["<unk>", "</s>", "▁", *letters, *(f"▁{letter}" for letter in letters)]
    merges = [("▁", letter) for letter in letters]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def in_pieces() -> PreTrainedTokenizerFast:
    """As Llama's of old where a text has no piece: a token for each byte, of which a run is text as a whole or not."""
    pieces = ["<unk>", "</s>", "\ufffd", "▁", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    whole = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    whole.decoder = decoders.Sequence(steps)
    whole.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>", eos_token="</s>")


def say(model: FathomForCausalLM, tokens: Sequence[int]) -> RemovableHandle:
    """Make a model draw these tokens, one a call, whatever it is given, until what is returned is removed."""
    left = iter(tokens)

    def head(module: torch.nn.Module, given: object, logits: torch.Tensor) -> torch.Tensor:
        row = torch.full_like(logits, -1.0)
        row[..., next(left)] = 1.0
        return row

    return model.lm_head.register_forward_hook(head)


def tiny_config(**fields: object) -> FathomConfig:
    """Depth-Attention in four layers, unless told otherwise."""
    small = {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "mixer": "depth_attention",
    }
    return FathomConfig(**{**small, **fields})


def export_tiny(directory: str | Path, chat: bool = True, **fields: object) -> Path:
    """A random model whose greedy answers differ from prompt to prompt."""
    torch.manual_seed(0)
    model = FathomForCausalLM(tiny_config(initializer_range=0.6, **fields))
    return export(model, directory, tiny_tokenizer(chat))
