"""Private data is found in the ways in which people write it, and nothing that only looks so."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from fathom.corpus.pipeline import build
from fathom.corpus.private import KINDS, PLACEHOLDERS, masked
from fathom.corpus.recipe import parse_corpus_recipe
from tests.corpus.prose import Prose, lines, recipe_values, write_jsonl

FALSE = """
Chrome/120.0.0.0 Safari
version 12.34.56.78 of it
see section 4.1.2.3 for more
192.168.0.1 and 127.0.0.1
10.1.2.3
@app.route('/') and a @ b.c
icon@2x.png is large
pkg@1.2.3 and left@right
git@github.com:a/b.git
malloc@libc.so.6(32) = 0x55
SSL_read@libssl.so.3
\\foo@bar.baz
ISBN 978-3-16-148410-0
ISSN 2049-3630
on 2024-01-15 at 12:30:45
doi:10.1000/182.3456
arXiv:2401.00434v2
1,234,567,890 people
3.14159265358979
pages 200-300 and 1990-1995
x+49301234567
+12 and -3
a + 1234567 b
std::vector<int>
12:34:56:78
fe80::1 is local
2001 was a year: 2002: 2003
0x1f:0x2f
key: value and token = identifier
password: correct_horse_battery
the key is kept, sk-learn and sk-image
hf_hub_download
api_key = os.environ['OPENAI_API_KEY']
token = get_token_from_the_environment()
https://a.org:8080/b@c
AKIA is a prefix
call 911 now
telephone in 1876
phone 7 and phone 8
RFC 2822, 1998-2001
1.2.3.4 Heading of it
100 200 3000
5-6-7-8
0.5.10.255-beta
sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
2025-11-29T19:28:13+00:00
""".strip().split("\n")
"""What nobody's data is."""


SHAPES = {
    "email": """
NAME@HOST.org
NAME.x+y@mail-HOST.co.uk
NAME [at] HOST [dot] com
NAME(at)HOST.de
mailto:NAME@HOST.com
<NAME@HOST.fr>
NAME@müller.de""",
    "ip": """
IP.77
[8.8.4.4]
http://IP.34/x
ssh IP.69:22
2606:2800:220:1:248:1893:25c8:1946
2a00:1450:4001::AAA""",
    "phone": """
(AAA) BBB-CCCC
AAA-BBB-CCCC
AAA.BBB.CCCC
+1 AAA BBB CCCC
+1-AAA-BBB-CCCC
+44 20 7BBB CCCC
+4930AAACCCC
+33 (0) 1 AA BB CC CC
0049 30 AAACCCC
Tel.: 030/AAACCCC
phone: 020 7BBB CCCC
Fax 0AAA BBBCCCC""",
    "key": """
AKIAUUUUUUUUUU234567
ghp_36
sk-48
sk-proj-60
sk-ant-api03-60
hf_34
xoxb-1234567890-24
AIza35
sk_live_24
eyJ20.eyJ40.43
api_key = '32'
"password": "20"
SECRET_TOKEN=40
https://bob:12@HOST.com
-----BEGIN RSA PRIVATE KEY-----|64|64|-----END RSA PRIVATE KEY-----""",
}
"""In each, runs of a capital letter are drawn, and a number at its end is so many random letters and digits."""


def planted(chance: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, text) of private data."""

    def drawn(letters: str, count: int) -> str:
        return "".join(chance.choice(letters) for _ in range(count))

    def mixed(match: re.Match[str]) -> str:
        return f"a7{drawn(string.ascii_letters + string.digits, int(match[0]) - 4)}Z3"

    for kind, shapes in SHAPES.items():
        for shape in shapes.strip().split("\n"):
            text = shape.replace("NAME", drawn(string.ascii_lowercase, 6)).replace("HOST", drawn("abcdefgh", 7))
            if kind == "key":
                text = re.sub(r"(?<![\w-])(?:12|20|24|32|64)(?!\w)|(?<=[=_A-Za-z.-])(?:[2346]\d)(?!\d)", mixed, text)
                text = re.sub("U{10}", drawn(string.ascii_uppercase, 10), text).replace("|", "\n")
            text = text.replace("IP", f"{chance.randrange(11, 100)}.{chance.randrange(40, 256)}.1")
            for run in ("AAA", "BBB", "CCCC", "AA", "BB", "CC"):
                text = text.replace(run, drawn("23456789", len(run))) if kind in ("phone", "ip") else text
            yield kind, text


def test_recall_and_false_hits() -> None:
    """Every planted one becomes its placeholder, and nothing else does, alone or all at once."""
    prose = Prose(3)
    missed = []
    for seed in range(5):
        for kind, text in planted(random.Random(seed)):
            found, counts = masked(f"{prose.sentence(6)} {text}, {prose.sentence(6)}", KINDS)
            if counts != {kind: 1} or PLACEHOLDERS[kind] not in found:  # type: ignore[index]
                missed.append((kind, text, found))
    assert missed == []
    assert [(text, masked(text, KINDS)[0]) for text in FALSE if masked(text, KINDS)[1]] == []
    assert masked("a@b.org", ["ip"]) == ("a@b.org", {})


def test_an_address_in_emphasis_and_a_short_one() -> None:
    assert masked("mail _ann@lake.org_ from 2600::1.", KINDS)[0] == "mail <EMAIL>_ from <IP>."


def test_domains_that_files_end_in_too() -> None:
    assert masked("ann@lake.edu.py, ann@lake.md or ann@lake.so", KINDS)[0] == "<EMAIL>, <EMAIL> or <EMAIL>"


@pytest.mark.slow
def test_masks_are_counted_in_the_card(tmp_path: Path, tokenizer: str) -> None:
    """Without the option every document is what it was; conversations are masked, too."""
    said = f"{Prose(2).document(80)} Write to ann@lake.org or call +44 20 7946 0958."
    talk = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "ann@lake.org"}]}
    documents, talks = write_jsonl(tmp_path / "a.jsonl", [said]), write_jsonl(tmp_path / "b.jsonl", [talk])
    both = {"a": [documents], "b": {"inputs": [str(talks)], "kind": "conversations"}}
    for mask in ([], ["email", "phone"]):
        values = recipe_values(both, normalize={"mask": mask}, tokenize={"tokenizer": tokenizer, "held_out": 0.0})
        values["converse"] = {"template": "alpaca"}
        out = tmp_path / f"out{len(mask)}"
        card = build(parse_corpus_recipe(values), out).card.read_text()
        texts = " ".join(row["text"] for row in lines(out / "stages" / "clean" / "part-00000.jsonl"))
        assert ("ann@lake.org" in texts) is not bool(mask) and texts.count("<EMAIL>") == 2 * bool(mask)
        assert ("Masked: 2 e-mail addresses, 1 telephone number" in card) is bool(mask)


@pytest.mark.parametrize(
    "text",
    [
        *("@" * 20_000, "1." * 20_000, "a@" * 10_000, "+1 " * 10_000, "key=" * 8_000, "(at)" * 8_000),
        "tel: " + "1" * 20_000 + "x",
    ],
)
def test_hostile_text_takes_no_time(text: str) -> None:
    masked(text, KINDS)
