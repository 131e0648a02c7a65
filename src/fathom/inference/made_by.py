"""Records how an output file of answers was made: the model, its tokenizer and the settings, kept next to it in
`OUT.settings.json`.

`prompt_file.py` resumes an output file if `keep_record` here finds no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fathom.errors import SettingsError
from fathom.inference.settings import Sampling
from fathom.report.files import asdict, read_json, write_json

SAMPLED = 1024
"""Most numbers of a tensor that are hashed one by one, evenly spaced; the others are summed."""
IRRELEVANT = {"compile"}
"""Settings that do not change the answers."""
DIGESTS = {"model", "tokenizer", "generation_config"}
"""The settings that an error names without their values."""
ABSENT = object()


def made_by(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, batch_size: int
) -> dict[str, Any]:
    """Everything on which the answers in an output file depend, by name, as JSON values.

    Seeds belong to batches, so the batch size counts where tokens are drawn.
    """
    drawn = bool(sampling.arguments(model.generation_config).get("do_sample"))
    own = model.generation_config.to_dict()
    own.pop("transformers_version", None)
    said = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    settings = {key: value for key, value in asdict(sampling).items() if key not in IRRELEVANT}
    return json.loads(
        json.dumps(
            {
                "model": weights_digest(model),
                "tokenizer": hashlib.sha256(f"{said}\n{tokenizer.chat_template}".encode()).hexdigest(),
                "generation_config": own,
                **settings,
                "batch_size": batch_size if drawn else None,
            },
            default=str,
        )
    )


@torch.no_grad()
def weights_digest(model: PreTrainedModel) -> str:
    """A digest of a model's configuration and weights; each weight is read once.

    The bits of a tensor are summed as whole numbers, so the sum does not depend on the order, threads or device.
    """
    config = model.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "_attn_implementation_internal"):
        config.pop(key, None)
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(_bits_digest(tensor))
    return found.hexdigest()


def _bits_digest(tensor: Tensor) -> bytes:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    bits = tensor.contiguous().view(-1).view(whole)
    some = bits[:: max(1, len(bits) // SAMPLED)].cpu()
    return some.numpy().tobytes() + str(int(bits.sum(dtype=torch.int64))).encode()


def record_of(out: Path) -> Path:
    """The path of the record, `OUT.settings.json`, beside the output file `OUT`."""
    return out.with_name(f"{out.name}.settings.json")


def keep_record(out: Path, made: Mapping[str, Any], answered: int) -> None:
    """Record what makes the answers in an output file; refuse a file whose first answers were made by another model or
    with other settings."""
    record = record_of(out)
    if not answered:
        return write_json(record, made)
    advice = "choose another `out`"
    if not record.exists():
        raise SettingsError(
            f"{out} has answers, but {record.name}, which names the model and options behind them, is missing; {advice}"
        )
    try:
        before = read_json(record)
    except ValueError as error:
        raise SettingsError(f"{record}: {error}; {advice}") from error
    for name in [*made, *(before.keys() - made.keys())]:
        old = before.get(name, ABSENT)
        if old != made.get(name, ABSENT):
            shown = f"another {name}" if name in DIGESTS else f"{name}={old!r:.60}"
            raise SettingsError(f"{out}: its answers were made with {shown}; {advice}")
    return None
