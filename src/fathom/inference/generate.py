"""Text from a trained model, token by token as it is drawn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class GenerateError(ValueError):
    """Something that cannot be generated from or as asked; the message is one line."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    max_new_tokens: int = 128
    """Tokens at most; fewer where the context or the text ends."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that make up this probability."""
    seed: int | None = None
    """Draw the same text every time."""

    def __post_init__(self) -> None:
        allowed = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, up to 1"),
        }
        for name, (holds, words) in allowed.items():
            if not holds:
                raise GenerateError(f"--{name.replace('_', '-')} {getattr(self, name)}: allowed: {words}")

    def arguments(self) -> dict[str, Any]:
        """As transformers' `generate` takes them."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass(frozen=True)
class Generated:
    """A text and how fast it came."""

    text: str
    """Without the prompt."""
    prompt_tokens: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Reading the prompt included."""
        return self.tokens / self.seconds if self.seconds else 0.0


def find_model(path: str | Path) -> Path:
    """The exported model behind a path: a model directory, a run, or a comparison, whose best arm is taken."""
    path = Path(path)
    if not path.exists():
        raise GenerateError(f"{path}: no such directory")
    if (path / "config.json").exists():
        return path
    if (path / "model" / "config.json").exists():
        return path / "model"
    if (path / "report.json").exists():
        return _best(path)
    if (path / "recipe.yaml").exists():
        raise GenerateError(f"{path}: this run wrote no model; it is unfinished, or train.export was false")
    raise GenerateError(f"{path}: neither a model directory (config.json) nor a run nor a comparison")


def load(path: str | Path, device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of an exported directory, ready to generate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import fathom

    fathom.register()
    logging.disable_progress_bar()
    directory = find_model(path)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        return model.eval().to(device), tokenizer
    except (OSError, ValueError, RuntimeError) as error:
        raise GenerateError(f"{directory}: {' '.join(str(error).split())}") from error


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompt: str, sampling: Sampling | None = None, write: Callable[[str], Any] | None = None
) -> Generated:
    """Continue a prompt.

    Args:
        model: Any Hugging Face causal language model.
        tokenizer: Its tokenizer.
        prompt: What to continue; an empty one starts a new document.
        sampling: How tokens are drawn.
        write: Receives the text as it comes, whole characters at a time.
    """
    sampling = sampling or Sampling()
    ids = tokenizer(prompt, return_tensors="pt").input_ids if prompt else torch.tensor([[tokenizer.eos_token_id]])
    room = model.config.max_position_embeddings - ids.shape[1]
    if room < 1:
        raise GenerateError(f"the prompt has {ids.shape[1]} tokens; this model's context is {ids.shape[1] + room}")
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    streamer = _streamer(tokenizer, write) if write is not None else None
    began = time.perf_counter()
    ids = ids.long().to(model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(sampling.max_new_tokens, room),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        streamer=streamer,
        **sampling.arguments(),
    )
    new = out[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Generated(text, ids.shape[1], len(new), time.perf_counter() - began)


def to_terminal(text: str) -> None:
    """Show text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _streamer(tokenizer: Any, write: Callable[[str], Any]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _best(path: Path) -> Path:
    """The model of the best run of a comparison's best arm."""
    report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    scored = [arm for arm in report["arms"] if arm["runs"]]
    if not scored:
        raise GenerateError(f"{path}: no arm of this comparison is finished")
    arm = min(scored, key=lambda arm: arm["loss"])
    run = min(arm["runs"], key=lambda run: run["loss"])
    return find_model(path / run["directory"])
