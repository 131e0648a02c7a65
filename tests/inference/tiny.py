"""A tiny model with a real tokenizer, exported: a second to make, milliseconds a token."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fathom.checkpoints.export import export
from fathom.models import FathomConfig, FathomForCausalLM

TEXT = [
    "To fathom a thing is to measure its depth, and after much thought to understand it.",
    "The sailors let the lead fall into the dark water, and called the depth aloud.",
    "Ein Faden misst sechs Fuß; wer Tiefen lotet, zählt die Knoten. 深さを測る。",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
