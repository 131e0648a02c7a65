"""Whether answers that end in `stop` follow their schema, whatever a model says: every allowed token is as likely.

    python benchmarks/structured.py TOKENIZER ... --out benchmarks/results/structured.json

`special`: for each tokenizer, an enum, a constant, a key and a pattern with the name of each special token. `random`:
500 random schemas, whose answers jsonschema checks. `hostile`: a hundred schemas that take much time or memory; each is
refused, or its answer ends, and the longest a request keeps the thread of the engine is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from tests.inference.schemas import hostile_schemas, random_schema
from tests.inference.test_grammar import NAMES, OTHERS, answer
from tests.tiny import tiny_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fathom.errors import SettingsError
from fathom.inference.control import special_names
from fathom.inference.grammar import json_grammar
from fathom.inference.structure import Grammars, MatcherClock
from fathom.report.files import write_json
from fathom.report.provenance import provenance

SCHEMAS, SEEDS = 500, 2


def grammars_of(tokenizer: PreTrainedTokenizerBase, apart: bool = False) -> Grammars:
    """The grammars of a tokenizer's model, which ends texts with any special token."""
    ends = frozenset(tokenizer.convert_tokens_to_ids(special_names(tokenizer)))
    return Grammars(tokenizer, len(tokenizer), ends, apart)


def checked(grammars: Grammars, schema: Mapping[str, Any], seed: int) -> str:
    """How an answer ends: `valid`, `length`, or what is wrong with it."""
    clock = MatcherClock()
    clock.masks = 10**6  # so that no answer ends for its time
    try:
        constraint = grammars.begin(grammars.compile(json_grammar(schema)), clock)
    except SettingsError:
        return "refused"
    text, why = answer(grammars, constraint, seed)
    if why != "stop":
        return why
    try:
        good = Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        good = False
    return "valid" if good else f"INVALID {json.dumps(schema)}: {text!r}"


def special(folder: Path) -> dict[str, Any]:
    """Every special token of a tokenizer, by its name."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names, grammars, ends = special_names(tokenizer), grammars_of(tokenizer), Counter[str]()
    schemas: list[dict[str, Any]] = [{"enum": list(names)}]
    for name in names:
        schemas += [{"enum": [name]}, {"enum": [f"a{name}b", name, f"{name}{name}"]}, {"const": {"end": name}}]
        schemas.append({"type": "string", "pattern": f"^x{re.escape(name)}y$"})
        schemas.append({"type": "object", "properties": {name: {"const": name}}, "required": [name]})
        schemas[-1]["additionalProperties"] = False
    for schema in schemas:
        ends.update(checked(grammars, schema, seed) for seed in range(SEEDS))
    return {"names": len(names), "answers": sum(ends.values()), "ends": ends}


def drawn() -> dict[str, Any]:
    """Random schemas."""
    chance, grammars = random.Random(11), grammars_of(tiny_tokenizer())
    ends = Counter(checked(grammars, random_schema(chance, [*NAMES, *OTHERS]), seed) for seed in range(SCHEMAS))
    return {"schemas": SCHEMAS, "ends": ends}


def hostile() -> dict[str, Any]:
    """Schemas that take much: compiled apart, under the server's limits."""
    grammars, ends, most = grammars_of(tiny_tokenizer(), apart=True), Counter[str](), 0.0
    for schema in hostile_schemas():
        try:
            compiled = grammars.compile(json_grammar(schema))
        except SettingsError as error:
            ends[f"refused: {re.sub('[0-9]+|`.*', 'N', str(error))[:60]}"] += 1
            continue
        clock, began = MatcherClock(), time.thread_time()
        _, why = answer(grammars, grammars.begin(compiled, clock), 0)
        ends[why] += 1
        most = max(most, clock.seconds, time.thread_time() - began if not clock.masks else 0.0)
    return {"schemas": sum(ends.values()), "ends": ends, "most_seconds_of_masks": most}


def main() -> None:
    """Measure, print, and write the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {f"special, {folder.name}": special(folder) for folder in options.tokenizers}
    results |= {"random": drawn(), "hostile": hostile()}
    print(json.dumps(results, indent=1))
    if options.out is not None:
        write_json(options.out, {"provenance": vars(provenance()), "load": os.getloadavg()[0], "results": results})


if __name__ == "__main__":
    main()
