"""Write a model as a Hugging Face directory that opens with Fathom absent."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

from fathom.models import modeling
from fathom.models.modeling import FathomForCausalLM

AUTO_MAP = {
    "AutoConfig": "configuration.FathomConfig",
    "AutoModel": "modeling.FathomModel",
    "AutoModelForCausalLM": "modeling.FathomForCausalLM",
}


def export(model: FathomForCausalLM, directory: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """Write weights, configuration, tokenizer and the model code to `directory`, whole or not at all.

    `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` then opens it anywhere; where Fathom is
    imported, no code of the directory is run. An earlier export in the same place is replaced.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()) and not _is_export(directory):
        raise ValueError(f"{directory} exists and is not an earlier export; choose another place")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        new = Path(scratch) / "new"
        model.save_pretrained(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        _add_code(new)
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        new.rename(directory)
    return directory


def _is_export(directory: Path) -> bool:
    try:
        return json.loads((directory / "config.json").read_text()).get("auto_map") == AUTO_MAP
    except (OSError, ValueError):
        return False


def _add_code(directory: Path) -> None:
    for source in {modeling.__file__, *get_relative_import_files(modeling.__file__)}:
        shutil.copyfile(source, directory / Path(source).name)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = AUTO_MAP
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
