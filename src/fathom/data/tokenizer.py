"""Tokenizers: any that Hugging Face can load, or a byte-level BPE trained here.

`load_tokenizer` needs a fast form (`tokenizer.json`). Without transformers, `plain_tokenizer.py` reads such a file or
its directory, but no name on the Hub. Special tokens that are spelled out in a document are encoded as text (`plain`).

`corpus/tokens.py` (`training_texts`) chooses the text that a tokenizer is trained on, held-out documents excluded:
`--tokenizer-bytes`, or less if its different words exceed `WORDS_AT_MOST`. The same file stores chat templates.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Union

from fathom.checkpoints.file_names import TOKENIZER_CONFIG
from fathom.checkpoints.tokenizers import missing, what_lacks
from fathom.data.plain_tokenizer import PlainTokenizer
from fathom.data.shards import TOKENIZER, file_crc32, first_line
from fathom.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

AnyTokenizer = Union["PreTrainedTokenizerBase", PlainTokenizer]
EOS, PAD = "<|endoftext|>", "<|pad|>"
SMALLEST_VOCABULARY = 258  # every byte, EOS and padding
# Qwen's: words with their leading space, single digits, punctuation, runs of white space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Nearly the same pieces with the standard library's `re`: for counting words, not for splitting text.
PIECE = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s+")
WORDS_AT_MOST = 1 << 24
"""Most bytes of distinct words in a training, which needs 40 to 85 times as much memory, at most 1.4 GB."""


def _has_transformers() -> bool:
    return find_spec("transformers") is not None


def train_bpe(texts: Iterable[str], vocab_size: int, tokens: Sequence[str] = ()) -> AnyTokenizer:
    """Train a byte-level BPE; the same texts in the same order give the same tokenizer.

    Args:
        texts: The texts to learn merges from.
        vocab_size: Requested number of tokens, EOS and padding included; a small corpus may give fewer.
        tokens: Further special tokens, such as those that begin and end a message.

    Returns:
        A `transformers.PreTrainedTokenizerFast`; a `PlainTokenizer` if transformers is not installed.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"train_tokenizer={vocab_size}: a byte-level tokenizer needs at least {SMALLEST_VOCABULARY} tokens"
        )
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD, *tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if not _has_transformers():
        return PlainTokenizer.of(tokenizer, EOS, PAD, tokens)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": list(tokens)} if tokens else {}),
    )


def load_tokenizer(name: str, eos_token: str | None = None) -> AnyTokenizer:
    """Load a tokenizer from a directory, a `tokenizer.json` or the Hub.

    A tokenizer without a token to end documents is refused.

    Args:
        name: A directory, a file, or a name on the Hub.
        eos_token: The token that ends a document; by default the tokenizer's EOS, else `<|endoftext|>` if the tokenizer
            has it.
    """
    path = Path(name)
    try:
        tokenizer = _opened(path, name) if _has_transformers() else PlainTokenizer.read(name)
    except DataError:
        raise
    except Exception as error:
        words = what_lacks(path) or missing(error) or first_line(error)
        what = "cannot load the tokenizer" if path.exists() else "no such directory or file; as a name on the Hub"
        raise DataError(f"{name}: {what}: {words}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(f"{name}: the tokenizer has no fast (tokenizer.json) form")
    vocabulary = tokenizer.get_vocab()
    if eos_token is None and tokenizer.eos_token_id is None:
        if EOS not in vocabulary:
            raise DataError(f"{name}: the tokenizer names no token to put between documents: set `eos_token`")
        eos_token = EOS
    if eos_token is not None:
        if eos_token not in vocabulary:
            raise DataError(f"{name}: the tokenizer has no token {eos_token!r}")
        tokenizer.eos_token = eos_token
    return tokenizer


def _opened(path: Path, name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    with quiet():  # it warns of a configuration whose model is not registered
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # None would ask


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of transformers and of huggingface_hub, which warns of every retry, within a `with`
    block."""
    from transformers.utils import logging as theirs

    before, hub = theirs.get_verbosity(), logging.getLogger("huggingface_hub")
    level = hub.level
    theirs.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.set_verbosity(before)
        hub.setLevel(level)


def save_tokenizer(tokenizer: AnyTokenizer, directory: Path) -> None:
    """Save to the corpus directory."""
    tokenizer.save_pretrained(directory / TOKENIZER)
    config = directory / TOKENIZER / TOKENIZER_CONFIG
    settings = json.loads(config.read_bytes())
    # The path that the tokenizer was loaded from is left out, because it would make equal corpora differ.
    settings.pop("name_or_path", None)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        # The same class under the name that transformers 4 knows.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True), encoding="utf-8")


def vocabulary_size(tokenizer: AnyTokenizer) -> int:
    """The embedding rows a tokenizer needs: its largest id plus one, which exceeds its length if ids have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def tokenizer_checksums(directory: Path) -> dict[str, int]:
    """The checksum of every file of a saved tokenizer."""
    return {path.name: file_crc32(path) for path in sorted((directory / TOKENIZER).iterdir()) if path.is_file()}


def plain_encoder(tokenizer_file: Path) -> Tokenizer:
    """Load a tokenizer from a file, and make it encode text literally (see `plain`)."""
    from tokenizers import Tokenizer

    return plain(Tokenizer.from_file(str(tokenizer_file)))


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer encode text literally: add nothing, truncate nothing, recognise no special token in the text."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer
