"""Texts up to a stop string; where the tokens of a prompt begin in it, for tokenizers that change what they read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fathom.inference.answers import chat_logprobs, completion_logprobs
from fathom.inference.engine import Scored
from fathom.inference.texts import BYTES, UNKNOWN, AnswerWords, Text, read_places, written_places
from tests.tiny import in_pieces, piece_tokenizer

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


def in_cuts() -> PreTrainedTokenizerFast:
    """Bytes, and tokens that end one character and begin another."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    pieces = [*sorted(letters), "©Ã", "ĠÃ", "¿½ï", END]  # as bytes A9 C3, 20 C3, and BF BD EF of a U+FFFD
    whole = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges=[]))
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token=END)


def numbers(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


def words_of_runs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], hidden: bool) -> str:
    """What tokens say one by one, with all since the last whole character decoded anew each time."""
    said, begin, told = "", 0, 0
    for i in range(1, len(tokens) + 1):
        before, now = (tokenizer.decode(tokens[begin:end], skip_special_tokens=hidden) for end in (told, i))
        if len(now) > len(before) and (i == len(tokens) or not now.endswith(UNKNOWN)):
            said, begin, told = said + now[len(before) :], told, i
    return said


LETTERS = ["Ã", "©", "ð", "Ł", "ĺ", "Ģ", "A", "ï", "¿", "½", "à"]
IN_BYTES = ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0x41>", "<0xFF>"]
POOLS = [
    (in_bytes, [LETTERS, ["Ã"], [*"ðŁĺĢ"], [*"ï¿½"], ["Ã", "©", END], ["Ģ", "Ã"]]),
    (in_cuts, [[*LETTERS, "©Ã", "ĠÃ", "¿½ï"], ["©Ã"], ["©Ã", "Ã"], ["¿½ï"], ["ĠÃ", END, "©"]]),
    (in_pieces, [[*IN_BYTES, "a", "▁", "</s>"], IN_BYTES, ["<0xFF>", *["<0x41>"] * 30], [UNKNOWN, "<0xFF>", "<0x41>"]]),
    (piece_tokenizer, [["a", "▁a", "▁", "\n", "</s>"]]),
]


@pytest.mark.parametrize(("make", "pools"), POOLS)
def test_words_are_those_of_whole_runs(make, pools: list[list[str]]) -> None:
    """Of bytes that make no character, and of those that do behind them; where bytes are characters, of all tokens."""
    chance, tokenizer = random.Random(0), make()
    for trial in range(400):
        tokens = numbers(tokenizer, *chance.choices(chance.choice(pools), k=chance.randint(1, 40)))
        tokens += numbers(tokenizer, *chance.choices(pools[0], k=chance.randint(0, 10)))
        words = AnswerWords(tokenizer, special=trial % 3 == 0)
        said = "".join(words.add([token]) for token in tokens) + words.add([], last=True)
        assert said == words_of_runs(tokenizer, tokens, words.hidden), tokenizer.convert_ids_to_tokens(tokens)
        assert make is in_pieces or said == tokenizer.decode(tokens, skip_special_tokens=words.hidden)


@pytest.mark.parametrize(("stop", "said"), [(" lead", ""), (" fell", " lead"), ("Thelead", " lead fell")])
def test_a_text_that_goes_on_keeps_its_first_blank(stop: str, said: str) -> None:
    """Of which decoding takes one where a text begins, as an answer of a conversation does."""
    tokenizer = piece_tokenizer()
    ids, prompt = tokenizer("lead fell")["input_ids"], tokenizer("The")["input_ids"]
    text, alone = Text(AnswerWords(tokenizer, after=prompt), [stop], "The"), AnswerWords(tokenizer)
    for token in ids:
        if text.finish is None:
            text.hear(Scored(token, 0.0))
    if text.finish is None:
        text.hear("length")
    assert text.said == f"The{said}"
    assert "".join(alone.add([token]) for token in ids) == "lead fell"


@pytest.mark.parametrize(
    ("stops", "least", "said", "count"),
    [
        (["ab"], 3, "x", 3),  # one that begins before `min_tokens` tokens, and ends there
        (["ab"], 4, "xab", 5),
        (["ab", "abc"], 4, "x", 4),
        (["ab", "abd"], 4, "xab", 5),  # one that ended earlier, and might have become another
        (["b"], 4, "xaba", 5),
    ],
)
def test_a_stop_string_about_the_least_number_of_tokens(stops: list[str], least: int, said: str, count: int) -> None:
    tokenizer = in_bytes()
    text, pieces = Text(AnswerWords(tokenizer), sorted(stops), min_tokens=least), list[str]()
    letters = "xabcabab" if "abc" in stops else "xabab"
    for token in tokenizer(letters)["input_ids"]:
        if text.finish is None:
            pieces.append(text.hear(Scored(token)))
    assert ("".join(pieces), text.said, text.tokens, text.finish) == (said, said, count, "stop")


def test_what_a_text_goes_on_from_changes_nothing_else() -> None:
    """Of bytes; nor half a character, or tokens without a text."""
    chance, tokenizer = random.Random(1), in_bytes()
    for _ in range(200):
        before, tokens = (numbers(tokenizer, *chance.choices([*LETTERS, END], k=chance.randint(0, 9))) for _ in "ab")
        words = AnswerWords(tokenizer, after=before)
        assert words.add(tokens, last=True) == tokenizer.decode(tokens, skip_special_tokens=True)


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner, self.count = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, tokens: Sequence[int], **how: Any) -> str:
        self.count += len(tokens)
        return str(self.inner.decode(tokens, **how))


@pytest.mark.parametrize(
    ("make", "pieces", "waiting"),
    [
        (in_bytes, ["Ã"], BYTES),
        (in_bytes, [*"ï¿½"], BYTES),
        (in_cuts, ["©Ã"], 2 * BYTES),
        (in_pieces, ["<0xFF>", *["<0x41>"] * 200], BYTES),
        (in_pieces, [UNKNOWN], 0),
        (in_bytes, [END], None),
        (in_bytes, [None], None),
    ],
)
def test_a_token_is_decoded_a_few_times(make, pieces: list[str | None], waiting: int | None) -> None:
    """Whatever run it is in: a text of 4000 halves of characters held up all clients for minutes."""
    tokenizer = Counting(make())
    cycle = [100_000 if piece is None else tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
    words, tokens = AnswerWords(tokenizer), (cycle * 600)[:600]
    said = "".join(words.add([token]) for token in tokens)
    assert tokenizer.count < 50 * len(tokens)
    assert waiting is None or 0 <= len(tokenizer.inner.decode(tokens)) - len(said) <= waiting
    special = Counting(make())
    written_places(special, "", tokens)
    assert special.count < 60 * len(tokens)


@pytest.mark.parametrize(("stop", "said"), [("b<end>", "ab\ufffdc"), ("\ufffd<end>", "ab"), ("<end>", "ab\ufffd")])
def test_a_special_token_behind_half_a_character(stop: str, said: str) -> None:
    """It was found before the half, where `ab<end>` is."""
    tokenizer = in_bytes()
    text, told = Text(AnswerWords(tokenizer), [stop]), ""
    for token in numbers(tokenizer, "a", "b", "Ã", END, "c"):
        if text.finish is None:
            told += text.hear(Scored(token, 0.0))
    told += text.hear("length") if text.finish is None else ""
    assert (told, text.said, text.finish) == (said, said, "length" if said.endswith("c") else "stop")


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


def test_a_long_prompt_is_read_in_silence(logged) -> None:
    """The server says what is too long; transformers would warn, of what is not."""
    tokenizer = in_bytes()
    tokens = tokenizer("a" * 9)["input_ids"]
    tokenizer.model_max_length = 3
    lines = logged("transformers")
    assert read_places(tokenizer, "a" * 9, tokens) == list(range(9))
    assert not lines
    tokenizer("a" * 9)
    assert "maximum sequence length" in lines[0]


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


def test_tokens_are_told_with_their_blanks() -> None:
    """Decoding drops the blank that begins a text, so a token and the one with a blank before it had one name."""
    tokenizer = piece_tokenizer()
    ids = tokenizer("the lead")["input_ids"]
    blank, plain = numbers(tokenizer, "▁t", "t")
    scores = [(Scored(token, -1.0, [(blank, -2.0), (plain, -3.0)]), 0) for token in ids]
    told: Any = completion_logprobs(tokenizer, scores)
    chat: Any = chat_logprobs(tokenizer, scores)["content"]
    assert "".join(told["tokens"]) == "".join(one["token"] for one in chat) == " the lead"
    assert bytes(byte for one in chat for byte in one["bytes"]) == b" the lead"
    assert told["top_logprobs"][1] == {"h": -1.0, " t": -2.0, "t": -3.0}
    assert [one["token"] for one in chat[1]["top_logprobs"]] == [" t", "t"]
    halves = in_bytes()
    half, end = numbers(halves, "Ã", END)
    assert completion_logprobs(halves, [(Scored(half, 0.0), 0), (Scored(end, 0.0), 0)])["tokens"] == [
        f"token_id:{half}",
        END,
    ]
