"""Open a checkpoint: check its directory, then load model and tokenizer, ready for use.

`hub.py` decides whether a name is a path or a repository, `find.py` finds the model of a run or a comparison, and
`untrusted.py` refuses unsafe directories. `families/keys.py` refuses unknown keys of a `config.json`, unless the caller
names them in `ignore_keys`; `families/family.py` (`kept`) decides which `attn_implementation` is followed.
`models/loading.py` refuses missing, unknown or misshapen tensors, and `hashes.py` warns of changed weights. Values that
transformers cannot use become one-line errors here (`_in_one_line`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.utils import logging

from fathom.checkpoints.families import known
from fathom.checkpoints.find import find_model
from fathom.checkpoints.from_gguf import is_gguf, open_gguf
from fathom.checkpoints.hashes import warn_if_changed
from fathom.checkpoints.hub import local
from fathom.checkpoints.int8 import WEIGHTS, quantise
from fathom.checkpoints.runs import open_decoder, read_config
from fathom.checkpoints.tokenizers import open_tokenizer
from fathom.checkpoints.untrusted import check_checkpoint
from fathom.errors import FathomError, ModelError, SettingsError
from fathom.models.loading import without_report

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a checkpoint is opened."""

    device: str | None = None
    """`cpu`, `cuda`, ...; by default cuda if available."""
    dtype: str = "auto"
    """`auto` (as stored, or float32 if the CPU is slow with the stored type), `float32`, `bfloat16` or `float16`."""
    trust_remote_code: bool = False
    """Run Python files of the directory, for architectures that neither transformers nor Fathom knows."""
    verify: bool = False
    """Compare weights above 2 GB with their hashes too."""
    weights: str = "stored"
    """`stored`, or `int8`: linear layers in eight bits, for inference on a CPU."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of another family's `config.json` to read the model without."""

    def open(self, path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Model and tokenizer, see `open_checkpoint`."""
        if self.weights not in WEIGHTS:
            raise SettingsError(f"weights={self.weights}: allowed: {', '.join(WEIGHTS)}")
        model, tokenizer = open_checkpoint(
            path, self.device, self.dtype, self.trust_remote_code, self.verify, self.ignore_keys
        )
        if self.weights == "int8":
            quantise(model)
        return model, tokenizer

    @property
    def numbers(self) -> str:
        """The dtype of the computation, and the weights' format if it is not `stored`, as text for result files."""
        return self.dtype if self.weights == "stored" else f"{self.dtype}, weights {self.weights}"


def load(
    where: str | Path,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    ignore_keys: Collection[str] = (),
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a model, ready for inference, and its tokenizer, from a directory or the Hugging Face Hub.

    Args:
        where: A model directory, a GGUF file, a run, a comparison (its best arm), or `org/name` or `org/name@revision`
            on the Hub, downloaded to the Hub's cache if it is not there yet. A local directory with this name takes
            precedence.
        device: `cpu`, `cuda`, ...; by default cuda if available.
        dtype: `auto` (as stored, or float32 if the CPU is slow with the stored type), `float32`, `bfloat16` or
            `float16`.
        trust_remote_code: Let transformers run Python files of the model, for architectures that neither transformers
            nor Fathom knows.
        ignore_keys: Keys of another family's `config.json` to read the model without; Fathom refuses keys that it does
            not know.
    """
    return open_checkpoint(where, device, dtype, trust_remote_code, ignore_keys=ignore_keys)


def open_checkpoint(
    path: str | Path,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    verify: bool = False,
    ignore_keys: Collection[str] = (),
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a model, ready for inference, and its tokenizer from a model directory, a run or a comparison.

    Args:
        path: An exported directory, any Hugging Face directory, `org/name[@revision]` on the Hub, a GGUF file, a run,
            or a comparison (its best arm).
        device: `cpu`, `cuda`, ...; by default cuda if available.
        dtype: `auto` (as stored, or float32 if the CPU is slow with the stored type), `float32`, `bfloat16` or
            `float16`.
        trust_remote_code: Let transformers run Python files of the directory, for architectures that neither
            transformers nor Fathom knows. Known architectures need no code.
        verify: Compare weights above 2 GB with `weights.sha256` too; smaller ones are always compared.
        ignore_keys: Keys of another family's `config.json` to read the model without.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: allowed: {', '.join(DTYPES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    model: PreTrainedModel
    if is_gguf(Path(path)):
        with _in_one_line(Path(path)):
            model, tokenizer = open_gguf(Path(path), dtype)
    else:
        directory = find_model(local(path, trust_remote_code))
        config = check_checkpoint(directory)
        warn_if_changed(directory, verify)
        logging.disable_progress_bar()  # loading takes about a second, and standard error may not be a terminal
        with _in_one_line(directory):
            if config.get("model_type") in known():
                settings = read_config(directory, ignore_keys)
                tokenizer = open_tokenizer(directory, settings, trust_remote_code)
                model = open_decoder(directory, settings, dtype=dtype)
            else:
                model, tokenizer = _open_stranger(directory, config, dtype, trust_remote_code)
    if dtype == "auto" and torch.device(device).type == "cpu":
        model = _fast_on_this_cpu(model)
    return model.eval().to(device), tokenizer


@contextlib.contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Turn any error into a one-line `ModelError`, since bad values in files raise many types of errors in
    libraries."""
    try:
        yield
    except (FathomError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        usual = isinstance(error, OSError | ValueError | RuntimeError | StrictDataclassError)
        kind = "" if usual else f"{type(error).__name__}: "
        hint = "; `trust_remote_code` allows it" if "trust_remote_code" in str(error) else ""
        raise ModelError(f"{path}: {kind}{' '.join(str(error).split())}{hint}") from error


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for 16-bit products; processors other than x86 are assumed to have them."""
    able = torch.cpu.get_capabilities()
    if able.get("architecture") != "x86_64":
        return True
    names = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return any(able.get(name) for name in names[dtype])


def _fast_on_this_cpu(model: PreTrainedModel) -> PreTrainedModel:
    """The model converted to float32 if the CPU would only emulate its 16-bit type; the weights keep their values."""
    stored = model.dtype
    if stored not in (torch.bfloat16, torch.float16) or getattr(model, "is_quantized", False) or multiplies(stored):
        return model
    name = str(stored).removeprefix("torch.")
    words = f"stored in {name}, which this CPU computes slowly; opened in float32, which takes twice the memory"
    warnings.warn(f"{words} (`dtype={name}` keeps it)", stacklevel=2)
    return model.float()


def _open_stranger(
    directory: Path, config: dict[str, object], dtype: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a model that Fathom does not know: by transformers, or by the model's own code if it is trusted."""
    for key in ("hidden_act", "hidden_activation"):
        if isinstance(config.get(key), str) and config[key] not in ACT2FN:
            raise ModelError(f"{directory}: config.json: {key} {config[key]!r} is not an activation of transformers")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{directory}: config.json: model_type {config.get('model_type')!r} must be a string")
    where = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    settings = AutoConfig.from_pretrained(directory, **where)
    tokenizer = open_tokenizer(directory, settings, trust_remote_code)
    with without_report():
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=settings,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **where,
        )
    _require_tensors(directory, info)
    with torch.inference_mode():  # the first token reveals shapes that contradict one another
        model.eval()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return model, tokenizer


def _require_tensors(directory: Path, info: Mapping[str, Collection[Any]]) -> None:
    """Refuse a checkpoint whose missing tensors transformers would initialise at random; print the names of unused
    tensors.

    Args:
        directory: The checkpoint's directory.
        info: transformers' loading info.
    """
    for name, found, needed in sorted(info["mismatched_keys"]):
        raise ModelError(f"{directory}: {name} has shape {list(found)}, but config.json needs {list(needed)}")
    for names, words in ((info["missing_keys"], "lacks"), (info["unexpected_keys"], "contains unused tensors:")):
        some = sorted(names)
        if some:
            line = f"{directory}: the checkpoint {words} {some[0]}" + (f" and {len(some) - 1} more" if some[1:] else "")
            if names is info["missing_keys"]:
                raise ModelError(line)
            print(f"fathom: {line}", file=sys.stderr, flush=True)


def own_context(directory: Path, trust_remote_code: bool = False, ignore_keys: Collection[str] = ()) -> int | None:
    """The maximum context length of a checkpoint, by whatever key its `config.json` gives it; None if unknown."""
    config = check_checkpoint(directory)
    try:
        if config.get("model_type") in known():
            return longest_context(read_config(directory, ignore_keys))
        where = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        return longest_context(AutoConfig.from_pretrained(directory, **where))
    except Exception:
        return None  # opening the model reports the error


def longest_context(config: PreTrainedConfig) -> int | None:
    """The number of tokens for which a model, or its text model, has positions; None if unknown."""
    size = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return size if isinstance(size, int) and size > 0 else None


def check_device(device: str) -> None:
    """Refuse a device that does not exist or is not available, before anything is read."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA raises an AssertionError
        raise ModelError(f"device={device}: {str(error).strip().splitlines()[0]}") from None
