"""Write a model as a Hugging Face directory that opens without Fathom, or as a GGUF file.

There are four forms. `fathom` contains the code of `models/` and supports every mechanism. `native` is a directory of
the model's original family, or of one that it equals tensor for tensor; every axis must have its first value. A
family's name selects that family. `unrolled` turns a loop into the equal, deeper stock model with repeated weights,
which any engine serves. `gguf` is this model, or the plain one, as a file for llama.cpp.

`to_gguf.py` decides which models and tokenizers a GGUF file can hold, `families/registry.py` (`unlike`) which family a
model fits. `models/packages.py` finds the source files to copy, also those of mechanisms from other packages.
`special_tokens.py` decides which EOS, BOS and padding ids `generation_config.json` has, and `hashes.py` writes
`weights.sha256`.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_imports

from fathom._version import __version__
from fathom.checkpoints.families import FAMILIES, family_of, native_config, to_theirs, unlike
from fathom.checkpoints.file_names import (
    CARD,
    CONFIG,
    MODEL,
    RECIPE,
    TOKENIZER_CONFIG,
    TOKENIZER_IDENTITY,
    TOKENIZER_JSON,
)
from fathom.checkpoints.find import Facts
from fathom.checkpoints.hashes import write_hashes
from fathom.checkpoints.places import is_empty
from fathom.checkpoints.runs import open_source
from fathom.checkpoints.special_tokens import as_field, as_list, known, settle_generation
from fathom.checkpoints.to_gguf import MAGIC, MARK, write_gguf
from fathom.checkpoints.tokenizers import identity
from fathom.errors import ModelError
from fathom.models import FathomConfig
from fathom.models.cost import cache_bytes_per_token
from fathom.models.hosts import build as hosts
from fathom.models.modeling import FathomForCausalLM
from fathom.models.packages import declared_as, exported, home, is_ours, needed, travelling
from fathom.models.pretrained import FathomPreTrainedModel
from fathom.models.recurrences.looping import LoopOptions
from fathom.models.registry import AXES, DEFAULTS, mechanism, mechanism_name
from fathom.report.files import as_usual, read_json

AUTO_MAP = {
    "AutoConfig": "configuration.FathomConfig",
    "AutoModel": "modeling.FathomModel",
    "AutoModelForCausalLM": "modeling.FathomForCausalLM",
}
FORMS = ("fathom", "native", "unrolled", "gguf", *FAMILIES)
FOLDERS = {"additional_chat_templates", "__pycache__", ".cache", ".ipynb_checkpoints"}
"""Folders that an export may hold: transformers' own, and what opening or publishing it leaves."""


def export(
    model: FathomPreTrainedModel | str | Path,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    form: str = "fathom",
    facts: Facts | None = None,
    also: Mapping[str, bytes] | None = None,
) -> Path:
    """Write weights, configuration, tokenizer, model card and code to `directory`, completely or not at all.

    `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` then opens it anywhere. After `import
    fathom.models`, no code of the directory is run. An earlier export in the same directory is replaced.

    Args:
        model: A model with any head, or the directory of a run, a comparison (its best run) or an earlier export.
        directory: The directory to write; for `gguf` a file, FILE.gguf.
        tokenizer: The tokenizer to save with the model; by default the run's.
        form: `fathom`, `native`, `unrolled`, `gguf`, or the name of a family.
        facts: Facts for the model card; by default the run's.
        also: Further files of the directory, by name.
    """
    directory = Path(directory)
    if form not in FORMS:
        raise ModelError(f"the form of an export must be one of {', '.join(FORMS)}, got {form!r}")
    if form == "gguf" and directory.suffix != ".gguf":
        raise ModelError(f"{directory}: a GGUF export is a single file; choose a path that ends in .gguf")
    require_replaceable(directory, *([Path(model)] if isinstance(model, str | Path) else []))
    if isinstance(model, str | Path):
        opened = open_source(Path(model), tokenizer)
        model, tokenizer, facts = opened.model, opened.tokenizer, facts or opened.facts
    given: object = getattr(model, "_orig_mod", model)  # of a compiled model
    model = cast("FathomPreTrainedModel", given)
    if not isinstance(model, PreTrainedModel) or model.config.model_type != FathomConfig.model_type:
        raise ModelError(
            f"export takes a model of Fathom, got a {type(model).__name__}: FathomForCausalLM.from_pretrained opens "
            "models of other classes, and merge_and_unload merges peft's adapters"
        )
    if form != "fathom" and not isinstance(model, FathomForCausalLM):
        raise ModelError(f"a {type(model).__name__} cannot be exported with `form={form}`; use `form=fathom`")
    shapes = {"fathom": lambda m: m, "native": as_native, "unrolled": as_unrolled, "gguf": as_unrolled}
    shaped = shapes[form](model) if form in shapes else as_native(model, form)
    with _scratch(directory) as scratch:
        new = Path(scratch) / "new"
        if form == "gguf":
            write_gguf(new, shaped, tokenizer, mechanism_name(model.config))
            new.replace(directory)
            return directory
        shaped.save_pretrained(new)
        for weights in new.glob("*.safetensors"):
            as_usual(weights)
        write_hashes(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
            _add_special_tokens(new, shaped, tokenizer)
            if (new / TOKENIZER_JSON).exists():
                hashed = identity((new / TOKENIZER_JSON).read_text(encoding="utf-8"))
                (new / TOKENIZER_IDENTITY).write_text(hashed + "\n", encoding="utf-8")
        if form == "fathom":
            _add_code(new, model.config)
        (new / CARD).write_text(model_card(model, form, facts or Facts()), encoding="utf-8")
        for name, content in (also or {}).items():
            (new / name).write_bytes(content)
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        new.rename(directory)
    return directory


def _scratch(directory: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder next to a directory that will be written; a rename out of it is atomic."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-")
    except OSError as error:
        raise ModelError(f"{directory}: {error.strerror}") from None


def as_native(model: FathomForCausalLM, name: str | None = None) -> PreTrainedModel:
    """Convert a model to a family's own class, tensor for tensor.

    Args:
        model: A model with every axis at its first value.
        name: The family's `model_type`; by default the model's original family, else the first that fits.
    """
    config = model.config
    for axis in AXES:
        if (value := getattr(config, axis)) != DEFAULTS[axis]:
            raise ModelError(f"no other model family has {axis}={value}; export the model with `form=fathom`")
    if config.host:
        return _hosted(model, name)
    return _stock(config, range(config.num_hidden_layers), model, name)


def _hosted(model: FathomForCausalLM, name: str | None) -> PreTrainedModel:
    """Convert a model that runs a family's own layers to that family's class in transformers."""
    config = model.config
    if name not in (None, config.host):
        raise ModelError(f"a {config.host} model cannot be exported as {name}; use `form=native` or `form=fathom`")
    stock: PreTrainedModel = AutoModelForCausalLM.from_config(hosts.native_config(config), dtype=model.dtype)
    stock.load_state_dict(model.state_dict(), assign=True)  # each tensor in its own dtype: some stay in float32
    stock.tie_weights()
    stock.generation_config = model.generation_config
    return stock


def as_unrolled(model: FathomForCausalLM) -> PreTrainedModel:
    """Convert a looped model to the equivalent deeper one of a stock class: one layer per layer pass, with copied
    weights."""
    if model.config.recurrence not in ("once", "loop"):
        raise ModelError(
            f"recurrence={model.config.recurrence} cannot be unrolled, since only the iterations of recurrence=loop "
            "equal additional layers; export the model with `form=fathom`"
        )
    if model.config.recurrence == "loop" and not LoopOptions.of(model.config).is_plain:
        raise ModelError(
            "a loop with injection, norm_between, damping, blend, exit or kv cannot be unrolled into a plain deeper "
            "model; export it with `form=fathom`"
        )
    for axis in ("mixer", "residual"):
        if (value := getattr(model.config, axis)) != DEFAULTS[axis]:
            raise ModelError(f"a model with {axis}={value} cannot be unrolled; export it with `form=fathom`")
    if model.config.host:
        raise ModelError(f"a {model.config.host} model cannot be unrolled; export it with `form=fathom`")
    visits = [visit for trip in model.model.plan_of(model.model.served_trips) for visit in trip]
    return _stock(model.config, [visit.layer for visit in visits], model)


def _stock(
    config: FathomConfig, layers: Sequence[int], model: FathomForCausalLM, name: str | None = None
) -> PreTrainedModel:
    """Convert some layers of a model, in a given order, to a model of a family's own class.

    A switch that the family lacks, such as keys that are normed after rotation, is refused.
    """
    layers = list(layers)
    plain = _plain(config, layers)
    family = FAMILIES[name] if name is not None else family_of(plain)
    if family is None:
        opened = FAMILIES.get(str(plain.native.get("model_type")))
        why = unlike(opened, plain) if opened is not None else "its switches"
        raise ModelError(f"no model family of transformers has {why}; export the model with `form=fathom`")
    if (why := unlike(family, plain)) is not None:
        raise ModelError(f"a model with {why} cannot be exported as {family.name}; use `form=fathom`")
    weights = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith("model.layers.")}
    for new, old in enumerate(layers):
        for key, tensor in model.model.layers[old].state_dict().items():
            again = old in layers[:new]  # a file contains every tensor once for each name
            weights[f"model.layers.{new}.{key}"] = tensor.clone() if again else tensor
    if config.embedding_scale != plain.embedding_scale:
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * config.embedding_scale
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    theirs = native_config(family, plain)
    cls = AutoModelForCausalLM._model_mapping[type(theirs)]
    tensors = to_theirs(weights, family.rules, plain)
    stock, info = cls.from_pretrained(
        None, config=theirs, state_dict=tensors, dtype=model.dtype, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    stock.generation_config = model.generation_config
    return stock


def _plain(config: FathomConfig, layers: Sequence[int]) -> FathomConfig:
    """The configuration of a plain model made of some layers, without the recurrence. A scale of untied embeddings is
    folded into them where no family has such a scale."""
    values = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("recurrence", "recurrence_options", "max_trips")
    }
    values |= {
        "num_hidden_layers": len(layers),
        "layer_types": [config.layer_types[i] for i in layers],
        "no_rope_layers": None if config.no_rope_layers is None else [config.no_rope_layers[i] for i in layers],
    }
    plain = FathomConfig(**values)
    if config.embedding_scale != 1.0 and not config.tie_word_embeddings and family_of(plain) is None:
        plain = FathomConfig(**{**values, "embedding_scale": 1.0})
    return plain


def model_card(model: FathomPreTrainedModel, form: str, facts: Facts) -> str:
    """A README for the directory: what the model is, how to open it, its training data and its scores."""
    config = model.config
    name = mechanism_name(config)
    parts = [mechanism(axis, getattr(config, axis)) for axis in AXES]
    used = [f"- **{p.name}** ({p.axis}): {p.summary} ({p.paper})" for p in parts if p.name != DEFAULTS[p.axis]]
    remote = form == "fathom"
    return CARD_TEXT.format(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        mark=f"{MARK} {__version__} in the form `{form}`.",
        mechanisms="\n".join(used) or "A plain decoder.",
        auto=_auto_class(model),
        task=TASKS[_auto_class(model)],
        remote=", trust_remote_code=True" if remote else "",
        note="\nAfter `import fathom.models`, `trust_remote_code` is not needed.\n" if remote else "",
        shape="\n".join(f"| {key} | {value} |" for key, value in _shape(config).items()),
        training="".join(f"\n{paragraph}\n" for paragraph in _trained(facts)),
    )


TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModel": "feature-extraction",
}
"""The Hub's name of each Auto class's task, the `pipeline_tag` of the model card."""
CARD_TEXT = """\
---
library_name: transformers
pipeline_tag: {task}
tags:
- fathom
- {name}
---

# {name}, {parameters:,} parameters

{mark}

{mechanisms}

## Open it

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("path/to/this"{remote})
tokenizer = AutoTokenizer.from_pretrained("path/to/this"{remote})
```
{note}
## Shape

| | |
| --- | --- |
{shape}
{training}"""


def _shape(config: FathomConfig) -> dict[str, object]:
    shape = {
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "heads, key-value heads": f"{config.num_attention_heads}, {config.num_key_value_heads}",
        "vocabulary": config.vocab_size,
        "longest context": config.max_position_embeddings,
        "cache bytes per token (bf16)": cache_bytes_per_token(config),
    }
    options = {axis: getattr(config, f"{axis}_options") for axis in AXES}
    return shape | {f"{axis} options": json.dumps(value) for axis, value in options.items() if value}


def _trained(facts: Facts) -> list[str]:
    """The model card's paragraphs on training: steps and tokens, held-out scores, the recipe."""
    found = []
    if facts.step is not None:
        tokens = "" if facts.tokens is None else f", {facts.tokens:,} tokens"
        found += ["## Training", f"{facts.step:,} steps{tokens}."]
    if facts.evaluation:
        scores = [
            f"{name.replace('_', ' ')} {v:.4f}"
            for name, v in facts.evaluation.items()
            if isinstance(v, float) and name != "coverage"
        ]
        found.append(f"Held out: {', '.join(scores)}.")
    if facts.recipe is not None:
        found.append(f"<details><summary>Recipe</summary>\n\n```yaml\n{facts.recipe.rstrip()}\n```\n\n</details>")
    return found


def require_replaceable(directory: Path, *models: Path) -> None:
    """Refuse to overwrite anything but an earlier export; also refuse to overwrite an input model or another run's
    model."""
    if not directory.exists():
        return

    def is_read(path: Path) -> bool:
        return any(one.exists() and path.samefile(one) for one in models)

    run = directory.absolute().parent
    if is_read(directory):
        raise ModelError(f"{directory} is the input model itself; choose another path")
    if models and directory.name == MODEL and (run / RECIPE).exists() and not is_read(run):
        raise ModelError(f"{directory} is the model of the run {run}; choose another path")
    if not _is_export(directory):
        raise ModelError(f"{directory} exists and is not an earlier export; delete it, or choose another path")


def _is_export(directory: Path) -> bool:
    try:
        if directory.is_file():
            with directory.open("rb") as file:
                head = file.read(1 << 12)
                return directory.suffix == ".gguf" and head.startswith(MAGIC) and MARK.encode() in head
        if any(path.is_dir() and path.name not in FOLDERS for path in directory.iterdir()):
            return False
        return is_empty(directory) or MARK in (directory / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _auto_class(model: FathomPreTrainedModel) -> str:
    """The name of transformers' Auto class that opens a model."""
    return next(auto for auto, place in AUTO_MAP.items() if place.endswith(f".{type(model).__name__}"))


def _add_code(directory: Path, config: FathomConfig) -> None:
    """Copy Fathom's source files, and those of mechanisms from other packages; the copied registry imports the
    latter."""
    theirs = [part for axis in AXES if not is_ours(part := mechanism(axis, getattr(config, axis)))]
    files = {name: text for part in theirs for name, text in travelling(part).items()}
    ours = {"modeling"}
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
        ours |= {module for module in get_relative_imports(directory / name) if f"{module}.py" not in files}
    for name in set().union(*map(needed, ours)):
        (directory / f"{name}.py").write_text(exported(name), encoding="utf-8")
    registry = directory / "registry.py"
    for part in theirs:
        name = declared_as(part)
        lines = f"\nfrom .{home(part).stem} import {name}\n\nMECHANISMS[{name}.name] = {name}\n"
        registry.write_text(registry.read_text(encoding="utf-8") + lines, encoding="utf-8")
    _amend(directory / CONFIG, {"auto_map": AUTO_MAP})


def _add_special_tokens(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's special tokens into the model's configurations, and its context length into the
    tokenizer's.

    EOS, BOS and padding ids that are not special tokens of the tokenizer give way to the tokenizer's own.
    """
    config = model.config
    ends = known(config.eos_token_id, tokenizer) or as_list(tokenizer.eos_token_id)
    begin = known(config.bos_token_id, tokenizer) or as_list(tokenizer.bos_token_id)
    # The embedding row of a padding token gets no gradient, so a token that ends texts must not be the padding token.
    pad = [
        token
        for token in [*known(config.pad_token_id, tokenizer), *as_list(tokenizer.pad_token_id)]
        if token not in {*ends, tokenizer.eos_token_id} and token < config.vocab_size
    ]
    tokens = {"eos_token_id": ends, "bos_token_id": begin, "pad_token_id": pad[:1]}
    _amend(directory / CONFIG, {key: as_field(ids) for key, ids in tokens.items()})
    if model.generation_config is not None:  # a bare decoder has none
        generation = copy.deepcopy(model.generation_config)
        settle_generation(generation, tokenizer)
        generation.save_pretrained(directory)
    names = {"model_max_length": config.max_position_embeddings}
    if type(tokenizer).__name__ == "TokenizersBackend":
        names["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows too
    _amend(directory / TOKENIZER_CONFIG, names)


def _amend(path: Path, keys: Mapping[str, object]) -> None:
    text = json.dumps({**read_json(path), **keys}, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
