"""`fathom new`: every anchor is in the tree, and nothing that exists is overwritten. The walks use it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.cli.main import main
from fathom.cli.new import SCAFFOLDS, _texts, checkout, forms_of

ROOT = checkout(Path(__file__))


@pytest.mark.parametrize("kind", SCAFFOLDS)
def test_every_file_and_line_has_its_place(kind: str) -> None:
    scaffold, forms = SCAFFOLDS[kind], forms_of("quite_new")
    texts = dict(_texts(ROOT, scaffold, forms))
    assert len(texts) == len(scaffold.files) + len({path for path, _, _ in scaffold.lines})
    for path, text in texts.items():
        there = ROOT / path
        known = there.read_text(encoding="utf-8") if there.exists() else ""
        assert text != known and any(name in text and name not in known for name in forms.values())
        assert there.exists() or scaffold.example not in text
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_wrong_names_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    taken = [("mixer", "loop"), ("mixer", "vanilla"), ("family", "qwen3"), ("cache", "full"), ("cache", "tova")]
    wrong = {("mixer", "Pair"): "lower-case", ("cache", "whole"): "is there already"}
    for words, said in {**wrong, **dict.fromkeys(taken, "name of something else already")}.items():
        assert main(["new", *words]) == 2 and said in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mixer", "pair"]) == 2 and "run this in a checkout" in capsys.readouterr().err
    assert main(["new", "mixer", "class"]) == 2 and "class is a keyword of Python" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
