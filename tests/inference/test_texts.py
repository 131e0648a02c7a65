"""Texts up to a stop string; where the tokens of a prompt begin in it, for tokenizers that change what they read."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fathom.inference.engine import Scored
from fathom.inference.texts import AnswerWords, Text, read_places, written_places

END = "<end>"


def in_bytes(special: AddedToken | None = None, begun: bool = False) -> PreTrainedTokenizerFast:
    """A token for each byte, so that characters are cut; `begun` as Llama 3's: a token of its own begins every text."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([special or AddedToken(END, special=True)])
    if begun:
        begin = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, whole.token_to_id(END))])
        whole.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token=special or END)


def in_words() -> PreTrainedTokenizerFast:
    """Words in small letters, without their blanks, behind a token that begins every text."""
    words = {word: i for i, word in enumerate(["<unk>", END, "the", "lead", "fell"])}
    whole = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    whole.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.StripAccents()])
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    whole.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 1)])
    whole.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>", eos_token=END)


def places(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int] | None:
    return read_places(tokenizer, text, tokenizer(text)["input_ids"])


def test_a_special_token_that_takes_the_blanks_beside_it() -> None:
    """The token behind it begins behind the blanks; decoding, which has no blanks, put it too far to the left."""
    tokenizer = in_bytes(AddedToken(END, special=True, lstrip=True, rstrip=True))
    text = f"ab  {END}  cd{END}e"
    assert places(tokenizer, text) == [0, 1, 2, 11, 12, 13, 18]
    assert written_places(tokenizer, text, tokenizer(text)["input_ids"]) != places(tokenizer, text)


def test_a_tokenizer_of_small_letters_without_blanks() -> None:
    tokenizer = in_words()
    text = f"The  LEAD {END} fell"
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == [END, "the", "lead", END, "fell"]
    assert places(tokenizer, text) == [0, 0, 3, 9, 15]


@pytest.mark.parametrize("read", [read_places, written_places])
def test_characters_that_tokens_share(read) -> None:
    """The bytes of a character begin where it does, or behind it if it is told when it is whole."""
    tokenizer = in_bytes()
    text = f"é{END}🜚z"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == 2 + 1 + 4 + 1
    assert read(tokenizer, text, tokens) == [0, 0, 1, 6, 6, 6, 6, 7]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("  ab", [0, 0, 1, 2, 3]), (" a  b", [0, 0, 1, 2, 3, 4]), ("a b", [0, 0, 1, 2]), ("é ", [0, 0, 0, 1])],
)
def test_offsets_that_leave_out_blanks(text: str, expected: list[int]) -> None:
    """A blank that begins the text is said to be nowhere, as is the token before it."""
    tokenizer = in_bytes(begun=True)
    assert places(tokenizer, text) == expected


def test_a_long_prompt_is_read_in_silence(caplog) -> None:
    """The server says what is too long; transformers would warn, of what is not."""
    tokenizer = in_bytes()
    tokens = tokenizer("a" * 9)["input_ids"]
    tokenizer.model_max_length = 3
    assert read_places(tokenizer, "a" * 9, tokens) == list(range(9))
    assert not caplog.records


def test_other_tokens_than_the_text_is_read_as() -> None:
    """A prompt of half a character is decoded with a mark in its place, which is read as another."""
    tokenizer = in_bytes()
    tokens = [*tokenizer("é")["input_ids"][:1], *tokenizer("ab")["input_ids"]]
    text = tokenizer.decode(tokens)
    assert read_places(tokenizer, text, tokens) is None
    assert written_places(tokenizer, text, tokens)[0] == 0


@pytest.mark.parametrize(
    ("stop", "heard", "said"),
    [
        (END, "ab<end>", "ab"),
        ("<en", "ab<end>", "ab"),
        ("b<end>c", "ab<end>c", "a"),
        ("d>c", "ab<end>c", "ab"),
        ("b<end>x", "ab<end>cd<end>", "abcd"),
        ("bc", "ab<end>cd<end>", "abcd"),
    ],
)
def test_stop_strings_with_special_tokens(stop: str, heard: str, said: str) -> None:
    """They are found in the text with these, which are no part of what is said; what was held for nothing is told."""
    tokenizer, told = in_bytes(), []
    text = Text(AnswerWords(tokenizer), [stop])
    tokens = iter(tokenizer(f"ab{END}cd{END}")["input_ids"])
    while text.finish is None:
        token = next(tokens, None)
        told.append(text.hear("length" if token is None else Scored(token, 0.0)))
    assert ("".join(told), text.said) == (said, said)
    assert tokenizer.decode(text.words.ids) == heard
    assert text.finish == ("length" if heard.endswith(f"d{END}") else "stop")
    assert [at for _, at in text.scores] == [0, 1, 2, 2, 3, 4][: text.tokens]
