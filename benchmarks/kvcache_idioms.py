"""The idioms of kvpress's README, as its README has them under kvpress and as Fathom has them, on one model.

    PYTHONPATH=FOLDER python benchmarks/kvcache_idioms.py MODEL --text FILE --ours OURS.pt
    OLD/bin/python benchmarks/kvcache_idioms.py MODEL --text FILE --theirs THEIRS.pt
    python benchmarks/kvcache_idioms.py --compare OURS.pt THEIRS.pt > LOG.json

FOLDER holds kvpress, installed without its dependencies beside today's transformers; OLD is an environment with
kvpress and a transformers below 5.3. The context is the first 2,400 letters of FILE. Pipelines answer two questions in
24 tokens each; where an idiom gives logits or entries, they are compared too. Keys of one word have equal norms but for
rounding: kvpress lets rounding choose among them, and Fathom keeps the earliest. So the log counts, for each idiom, the
choices in which more scores are equal than there are places. A file is written after each idiom, and goes on from it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline

QUESTIONS = ("\nWhat is this text about?", "\nWrite one sentence about the first thing that it names.")
LETTERS, NEW = 2400, 24
CLOSE = 5e-4
"""For logits in float32."""


def presses() -> dict[str, Any]:
    """The presses of the README's snippets; sizes fit a context of 600 tokens."""
    k = importlib.import_module("kvpress")
    decoding = functools.partial(k.DecodingPress, compression_interval=10, target_size=512)
    return {
        "pipeline": k.ExpectedAttentionPress(compression_ratio=0.5),
        "pipeline, SnapKVPress": k.SnapKVPress(compression_ratio=0.5),
        "pipeline, KeyRerotationPress": k.KeyRerotationPress(k.KnormPress(compression_ratio=0.4)),
        "pipeline, CriticalKVPress": k.CriticalKVPress(k.KnormPress(compression_ratio=0.4)),
        "DecodingPress": decoding(base_press=k.KnormPress()),
        "DecodingPress, TOVAPress": k.DecodingPress(k.TOVAPress(), compression_interval=7, target_size=200),
        "PrefillDecodingPress": k.PrefillDecodingPress(
            prefilling_press=k.CriticalKVPress(k.KnormPress()),
            decoding_press=k.DecodingPress(
                k.KnormPress(compression_ratio=0.2), compression_interval=5, target_size=256
            ),
        ),
        "PrefillDecodingPress, prompt compressed": k.PrefillDecodingPress(
            prefilling_press=k.CriticalKVPress(k.KnormPress(compression_ratio=0.3)),
            decoding_press=k.DecodingPress(k.KnormPress(), compression_interval=5, target_size=256),
        ),
    }


class Bench:
    """A model, a context and questions in the model's chat format, as kvpress's pipeline makes them."""

    def __init__(self, directory: Path, text: Path, ours: bool) -> None:
        self.ties = 0
        self.tokenizer, self.ours = AutoTokenizer.from_pretrained(directory), ours
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.context = text.read_text(encoding="utf-8")[:LETTERS]
        mark = "#" * (len(self.context) + 10)
        said = [{"role": "user", "content": self.context + mark}]
        formatted = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        before, after = formatted.split(mark)
        self.ids = self._ids(before)
        self.questions = [self._ids(question + after) for question in QUESTIONS]

    def _ids(self, text: str) -> Tensor:
        ids: Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        return ids

    def answers(self, press: Any, several: bool) -> list[str]:
        """The pipeline's idiom: the context is compressed, and questions are answered about it."""
        if not self.ours:
            importlib.import_module("kvpress")
            pipe = pipeline("kv-press-text-generation", model=self.model, tokenizer=self.tokenizer)
            if several:
                found: list[str] = pipe(self.context, questions=[*QUESTIONS], press=press, max_new_tokens=NEW)[
                    "answers"
                ]
                return found
            return [pipe(self.context, question=one, press=press, max_new_tokens=NEW)["answer"] for one in QUESTIONS]
        with self.compressing(press):
            cache = self.model(self.ids).past_key_values
        return [self._answer(question, cache.branch()) for question in self.questions]

    def _answer(self, question: Tensor, cache: Any) -> str:
        whole = torch.cat([self.ids, question], dim=1)
        found = self.model.generate(whole, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        return str(self.tokenizer.decode(found[0, whole.shape[1] :], skip_special_tokens=True))

    def compressing(self, press: Any, how: Mapping[str, Any] | None = None) -> Any:
        """`with press(model)`."""
        if not self.ours:
            return press(self.model)
        kvcache = importlib.import_module("fathom.kvcache")
        method = kvcache.press(press)
        for one in filter(None, (method, getattr(method, "prefilling", None))):
            one.choose = self._counting(one.choose)
        return kvcache.compressed(self.model, method, **(how or {}))

    def _counting(self, choose: Any) -> Any:
        """A method's `choose`, with its ties counted."""
        near = importlib.import_module("fathom.kvcache.method").NEAR

        def counted(method: Any, scores: Tensor) -> Any:
            kept = method.schedule.kept
            least = scores.topk(kept, dim=-1).values[..., -1:]
            equal = (scores - least).abs() <= near * least.abs()
            places = kept - ((scores > least) & ~equal).sum(-1)
            self.ties += int((equal.sum(-1) > places).sum())
            return choose(method, scores)

        return counted

    def shapes(self) -> dict[str, Any]:
        """The README's answer to "How does a press work?": the entries that a forward pass leaves, and its logits."""
        found = {}
        press = importlib.import_module("kvpress").KnormPress(compression_ratio=0.4)
        inputs = {"dummy inputs": self.model.dummy_inputs["input_ids"], "context": self.ids}
        inputs["different words"] = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[None, :200] + 500
        for name, ids in inputs.items():
            self.ties = 0
            with self.compressing(press):
                output = self.model(ids)
            cache, at = output.past_key_values, torch.arange(7).unsqueeze(0) + ids.shape[1]
            asked = self.ids[:, :7].expand(len(ids), -1)
            logits = self.model(asked, past_key_values=cache, position_ids=at).logits
            found[name] = {
                "ties": self.ties,
                "entries": cache.layers[0].keys.shape[2] - 7,
                "logits": [output.logits[:, -1], logits],
            }
        return found

    def generated(self, press: Any) -> list[int]:
        """`with press(model): model.generate(inputs)`."""
        whole = torch.cat([self.ids, self.questions[0]], dim=1)
        with self.compressing(press):
            found = self.model.generate(whole, past_key_values=DynamicCache(), max_new_tokens=NEW, do_sample=False)
        tokens: list[int] = found[0, whole.shape[1] :].tolist()
        return tokens

    def quantised(self) -> dict[str, Any]:
        """The README's quantised cache, with the configuration that transformers 5 asks for beside it."""
        press = importlib.import_module("kvpress").ExpectedAttentionPress(compression_ratio=0.5)
        found: dict[str, Any] = {}
        if not self.ours:
            quantised = importlib.import_module("transformers").QuantizedCache
            try:
                quantised(backend="quanto", nbits=4)
            except TypeError as error:
                found["as written"] = str(error)
        logits = []
        for bits in (None, 4):
            cache = DynamicCache() if self.ours or bits is None else quantised("quanto", self.model.config, nbits=bits)
            with self.compressing(press, {} if bits is None else {"quantized": f"int{bits}"}):
                self.model(self.ids, past_key_values=cache)
            at = torch.arange(self.questions[0].shape[1]).unsqueeze(0) + self.ids.shape[1]
            logits.append(self.model(self.questions[0], past_key_values=cache, position_ids=at).logits)
        return found | {"logits": logits[0], "moved": float((logits[1] - logits[0]).abs().mean())}


def idioms(bench: Bench) -> dict[str, Callable[[], Any]]:
    """What gives the results of each idiom."""
    found: dict[str, Callable[[], Any]] = {}
    for name, press in presses().items():
        found[name] = functools.partial(bench.answers, press, several="Decoding" not in name)
    for name in ("pipeline", "DecodingPress", "PrefillDecodingPress, prompt compressed"):
        found[f"generate, {name}"] = functools.partial(bench.generated, presses()[name])
    return found | {"with press(model)": bench.shapes, "QuantizedCache": bench.quantised}


@torch.no_grad()
def run(bench: Bench, out: Path) -> None:
    """Each idiom whose results the file does not have."""
    versions = {name: metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    found: dict[str, Any] = torch.load(out)["found"] if out.exists() else {}
    for name, work in idioms(bench).items():
        if name not in found:
            bench.ties = 0
            found[name] = {"gives": work(), "ties": bench.ties}
            torch.save({"versions": versions, "found": found}, out)


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Whether each idiom gives the same; for logits, the largest difference."""
    mine, wanted = (side["found"] for side in (ours, theirs))
    rows: dict[str, Any] = {}
    for name in mine:
        one, other = mine[name]["gives"], wanted[name]["gives"]
        if name == "QuantizedCache":
            gap = float((one["logits"] - other["logits"]).abs().max())
            moved = {"int4": one["moved"], "kvpress, quanto": other["moved"]}
            same = gap <= CLOSE and one["moved"] <= other["moved"]
            rows[name] = {"same": same, "as written": other.get("as written"), "exact logits differ by": gap}
            rows[name] |= {"4 bits move logits by": moved}
        elif name == "with press(model)":
            for inputs, read in one.items():
                pairs = zip(read["logits"], other[inputs]["logits"], strict=True)
                gap = max(float((a - b).abs().max()) for a, b in pairs)
                entries = [read["entries"], other[inputs]["entries"]]
                same = gap <= CLOSE and entries[0] == entries[1]
                rows[f"{name}, {inputs}"] = {"same": same, "ties": read["ties"], "entries": entries}
                rows[f"{name}, {inputs}"] |= {"logits differ by": gap}
        else:
            rows[name] = {"same": one == other, "ties": mine[name]["ties"], "ours": one, "kvpress": other}
    versions = {side: given["versions"] for side, given in (("ours", ours), ("kvpress", theirs))}
    tied = sorted(name for name, row in rows.items() if not row["same"] and row.get("ties"))
    return {
        "versions": versions,
        "differ, with ties": tied,
        "same": sum(row["same"] for row in rows.values()),
        "of": len(rows),
        "rows": rows,
    }


def main() -> None:
    """One of the three calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--theirs", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        print(json.dumps(compare(*(torch.load(path) for path in options.compare)), indent=1))
        return
    if options.model is None or options.text is None:
        parser.error("give a model and --text, or --compare")
    torch.set_num_threads(1)
    run(Bench(options.model, options.text, options.ours is not None), options.ours or options.theirs)


if __name__ == "__main__":
    main()
