"""`verify` holds for the truth and for nothing else: other files, other numbers, other words."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from fathom.cli import lineage as commands
from fathom.cli.main import main
from fathom.errors import ModelError
from fathom.lineage.publishing import verification
from tests.lineage.test_direction import changed, moved
from tests.lineage.zoo import build, save, save_adapter, tiny_config


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a fine-tuned copy, three strangers, an adapter that names no base, a null file."""
    root = tmp_path_factory.mktemp("family")
    for seed, name in enumerate(("base", "control", "control two", "stranger")):
        save(build(tiny_config("qwen3", num_hidden_layers=2), seed, torch.float32), root / name, 512)
    changed(root / "base", root / "copy", moved(0.1))
    save_adapter(root / "adapter", 64)
    commands.calibrate([str(root / name) for name in ("control", "control two", "stranger")], root / "null.json")
    return root


CASES = ("controls", "null", "adapter")


def given(family: Path, case: str) -> dict[str, Any]:
    adapter, base, copied, stranger = (str(family / name) for name in ("adapter", "base", "copy", "stranger"))
    if case == "adapter":
        return {"a": adapter, "b": stranger, "choices": commands.Choices(mode="exact", seed=3, adapter_base=base)}
    controls = [str(family / name) for name in ("control", "control two")]
    more = {"control": controls} if case == "controls" else {"null": family / "null.json"}
    return {"a": copied, "b": base, "choices": commands.Choices(), **more}


@pytest.fixture(scope="module")
def reports(family: Path) -> dict[str, Path]:
    out = {}
    for case in CASES:
        assert commands.compare(**given(family, case), out=family / f"report-{case}").exit_code == 0
        out[case] = family / f"report-{case}" / "report.json"
    return out


@pytest.mark.parametrize("case", CASES)
def test_a_report_holds(reports, case):
    result = commands.verify(reports[case])
    assert result.exit_code == 0, result.text
    assert result.text.splitlines()[0] == "holds" and "not recomputed: versions, platform" in result.text
    assert ("null file" in result.text) == (case == "null")


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from leaves(item, (*path, key))


def forged(value: Any, name: str | int) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        is_p = name in {"p", "corrected", "false_positive_rate_below"}
        return 0.98 * value**1.03 + 1e-300 if is_p else value + 0.07 * max(1, abs(value))
    digits = [i for i, c in enumerate(value) if c.isdigit()]
    return value + " These weights were stolen." if not digits else value[: digits[0]] + "9999" + value[digits[0] :]


@pytest.mark.quick("adapter")
@pytest.mark.parametrize("case", CASES)
def test_every_entry_is_checked_or_named_as_not(reports, case):
    """Each number, word and flag of a report changed in turn: all are noticed but those that are said not to be."""
    body = json.loads(reports[case].read_text()) | {"portraits": {}}
    assert verification.differences(body, body) == []
    free, changed = set(), copy.deepcopy(body)
    for path, value in leaves(body):
        place: Any = functools.reduce(lambda inner, key: inner[key], path[:-1], changed)
        whole = copy.copy(place)
        place[path[-1]] = forged(value, path[-1])
        if not verification.differences(changed, body):
            free.add(path[-1])
        del place[path[-1]]
        assert path[-1] in free or verification.differences(changed, body), path
        place.clear()
        place.update(whole) if isinstance(place, dict) else place.extend(whole)
    assert free == {"version", "numpy", "platform", "bytes_read", "seconds"}


@pytest.mark.parametrize("entry", ["pixels_sha256", "sketch_sha256", "words", "sketch"])
def test_portraits_are_checked(reports, entry):
    body = json.loads(reports["controls"].read_text())
    first, second = body["portraits"].values()
    changed = copy.deepcopy(body)
    next(iter(changed["portraits"].values()))[entry] = second[entry]
    assert first[entry] != second[entry] and verification.differences(changed, body)
    assert verification.differences(body | {"portraits": {}}, body)


@pytest.mark.parametrize("entry", [("inputs", 0, "bytes_read"), ("inputs", 1, "bytes_read"), ("seconds",)])
@pytest.mark.parametrize("value", [None, True, -1, "many", [], 1e999, {"a": 1}])
def test_what_cannot_be_recomputed_must_still_be_possible(reports, entry, value):
    """Bytes read and seconds are of one run, and yet no text, no list and nothing below 0."""
    body = json.loads(reports["controls"].read_text())
    changed = copy.deepcopy(body)
    functools.reduce(lambda inner, key: inner[key], entry[:-1], changed)[entry[-1]] = value
    (found,) = verification.differences(changed, body)
    assert found.startswith(".".join(map(str, entry))) and "cannot be" in found
    assert not verification.differences(body | {"seconds": 12}, body)


@pytest.mark.parametrize(("factor", "noticed"), [(0, 1), (0.4, 1), (0.9, 0), (1.9, 0), (3, 1), (1 << 40, 1)])
def test_a_report_cannot_say_that_more_or_less_of_a_model_was_read(reports, factor, noticed):
    body = json.loads(reports["controls"].read_text())
    changed = copy.deepcopy(body)
    item = changed["inputs"][1]
    item["bytes_read"] = int(factor * item["bytes_read"])
    found = verification.differences(changed, body)
    assert len(found) == noticed and all(one.startswith("inputs.1.bytes_read: ") for one in found)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("options", "extras", "yes"), ("options", "mode", 0), ("options", "mode", None), ("options", "seed", 1e308)]
    + [("given", "null", value) for value in (0, "", [], {}, "x" * 300)]
    + [("options", "further", 1), ("options", "seed", "2")],
)
def test_options_of_another_type_are_refused(reports, section, key, value):
    body = json.loads(reports["controls"].read_text())
    body[section][key] = value
    with pytest.raises(ModelError):
        verification.verify(body)


FORGERIES = {
    "tampering": lambda body: body["tampering"].append("made up"),
    "revision": lambda body: body["inputs"][0].update(revision="deadbeef"),
    "nan": lambda body: body["scores"]["awm"].update(value=float("nan")),
    "control": lambda body: body["controls"].pop(),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_report_does_not_hold(reports, tmp_path, name):
    body = json.loads(reports["controls" if name == "control" else "null"].read_text())
    FORGERIES[name](body)
    (tmp_path / "forged.json").write_text(json.dumps(body))
    try:
        result = commands.verify(tmp_path / "forged.json")
    except ModelError:  # what it names is not there
        return
    assert result.exit_code == 1 and result.text.splitlines()[0] == "does not hold"


@pytest.mark.quick("base-config.json")
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("model", ["base", "control"])
def test_other_files_under_the_same_name_fail(family, reports, model, file):
    path, report = family / model / file, reports["controls" if model == "control" else "null"]
    kept = path.read_bytes()
    try:
        if file == "model.safetensors":
            tensors = load_file(path)
            # a stranger's numbers, and one number alone in a tensor that no score looks at
            path.write_bytes((family / "stranger" / file).read_bytes())
            assert commands.verify(report).exit_code == 1
            tensors["model.norm.weight"][0] *= 1.001
            save_file(tensors, path)
        else:
            path.write_bytes(kept + b"\n")
        result = commands.verify(report)
        assert result.exit_code == 1 and file in result.text
    finally:
        path.write_bytes(kept)


def test_another_null_file_or_none_fails(family, reports):
    path = family / "null.json"
    kept = path.read_text()
    try:
        path.write_text(kept + " ")
        result = commands.verify(reports["null"])
        assert result.exit_code == 1 and "null.file.sha256" in result.text
        path.unlink()
        with pytest.raises(ModelError):
            commands.verify(reports["null"])
    finally:
        path.write_text(kept)


def test_reports_without_hashes_or_of_old_are_no_proof(family, tmp_path):
    body = commands.compare(str(family / "copy"), str(family / "base")).data
    (tmp_path / "bare.json").write_text(json.dumps(body))
    result = commands.verify(tmp_path / "bare.json")
    assert result.exit_code == 1 and "neither hashes of its files nor a commit" in result.text
    (tmp_path / "old.json").write_text(json.dumps(body | {"fathom_lineage_report": 1}))
    with pytest.raises(ModelError, match="not a report of version"):
        commands.verify(tmp_path / "old.json")


@pytest.mark.parametrize("case", CASES)
def test_the_printed_command_is_what_was_given(family, reports, case, monkeypatch):
    """The command in a report, parsed by the command line itself, asks for the same comparison."""
    body = json.loads(reports[case].read_text())
    words = shlex.split(body["tool"]["command"])
    asked: dict[str, Any] = {}

    @functools.wraps(commands.compare)
    def record(**arguments: Any) -> commands.Result:
        asked.update(arguments)
        return commands.Result(0, "")

    monkeypatch.setattr(commands, "compare", record)
    assert words[0] == "fathom" and main(words[1:]) == 0
    defaults = {n: p.default for n, p in inspect.signature(record).parameters.items()}
    want = defaults | given(family, case)
    want["choices"] = replace(want["choices"] or commands.Choices(), nonce=body["options"]["nonce"])
    assert {n: list(v) if isinstance(v, tuple) else v for n, v in asked.items()} == {
        n: list(v) if isinstance(v, tuple) else v for n, v in want.items()
    }
    if case == "controls":  # given one by one, no control is lost
        at = words.index("--control")
        assert main([*words[1 : at + 2], "--control", *words[at + 2 :]]) == 0
        assert list(asked["control"]) == want["control"]


PAGES = {
    "the meaning": lambda text, body: text.replace(body["verdict"]["meaning"], "One is a copy of the other."),
    "the label": lambda text, body: text.replace(f">{body['verdict']['label']}<", ">theft<"),
    "one more line": lambda text, body: text.replace("</main>", "<p>Proven.</p></main>"),
    "code": lambda text, body: text.replace("</main>", "<script>document.title = 1</script></main>"),
}


@pytest.mark.parametrize("change", PAGES)
def test_the_page_beside_a_report_is_bound_to_it(reports, tmp_path, change):
    """A journalist reads the page: its words have to be those of the report."""
    source = reports["controls"]
    body, text = json.loads(source.read_text()), source.with_name("report.html").read_text()
    assert verification.page_differences(text, text) == []
    lied = PAGES[change](text, body)
    assert lied != text and verification.page_differences(lied, text)


@pytest.mark.parametrize("given", [{"a": "model"}, {"key": Path("key")}], ids=["model", "key"])
def test_a_report_takes_no_model_and_no_key(tmp_path, given):
    (tmp_path / "report.json").write_text('{"fathom_lineage_report": 4}')
    with pytest.raises(ModelError, match=r"is a report, which names its own models: give neither A nor --key"):
        commands.verify(tmp_path / "report.json", **given)


def test_verify_reads_the_page(reports, tmp_path):
    source = reports["null"]
    (tmp_path / "report.json").write_text(source.read_text())
    assert "report.html: it is not in the folder of the report" in commands.verify(tmp_path / "report.json").text
    text = source.with_name("report.html").read_text()
    sentence = json.loads(source.read_text())["verdict"]["sentence"]
    (tmp_path / "report.html").write_text(text.replace(sentence, "These weights were stolen."))
    result = commands.verify(tmp_path / "report.json")
    assert result.exit_code == 1 and "report.html: says 'These weights were stolen.'" in result.text


@pytest.mark.parametrize(
    ("said", "again", "same"),
    [
        ("851e718a" + "0" * 56, "851e718a" + "0" * 56, True),  # read as a number it is infinite
        ("12e3" + "a" * 60, "12e3" + "a" * 59 + "b", False),
        ("12e3" + "0" * 60, "13e3" + "0" * 60, False),
        ("p 1.00e-05 of 12", "p 1.00e-05 of 12", True),
        ("p 1.00e-05 of 12", "p 1.00e-05 of 13", False),
    ],
)
def test_hashes_are_compared_as_they_are(said, again, same):
    """Also in sections whose sentences may differ in the last digit of a number."""
    assert verification._same(said, again, ("null", "pairs", "1", "0")) is same


@pytest.mark.parametrize("word", ["851e718abcdef012", "12e3000000000000"])
def test_the_hashes_of_a_page_are_compared_as_they_are(word):
    page = "<p>root {}</p>"
    assert verification.page_differences(page.format(word), page.format(word)) == []
    for other in (word[:-1] + "3", word[:4] + "9" + word[5:]):
        assert verification.page_differences(page.format(word), page.format(other))
