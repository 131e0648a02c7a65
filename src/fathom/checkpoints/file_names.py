"""Names of the files in a model directory, a run and a comparison.

`run_and_step` parses names of checkpoints such as `RUN@step-400`; `runs.py` opens these checkpoints.
"""

from __future__ import annotations

from pathlib import Path

from fathom.report import PAGE as PAGE
from fathom.report import REPORT as REPORT

# A model directory, in Hugging Face's format.
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE_MODEL = "tokenizer.model"
CHAT_TEMPLATE = "chat_template.jinja"
QWEN_TIKTOKEN = "qwen.tiktoken"
VOCABULARY = "vocab.json"
TOKENIZER_IDENTITY = "tokenizer.sha256"
WEIGHT_HASHES = "weights.sha256"
CARD = "README.md"
WEIGHTS = "model.safetensors"
INDEX = WEIGHTS + ".index.json"
INDEX_SUFFIX = ".safetensors.index.json"
HEAL = "heal.yaml"  # of a deepened model: the recipe that trains it further
EXITS = "exits.json"  # of a loop with exits: the bound, and what was measured

# A PEFT adapter's directory.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

# A run: `runs/NAME/`.
RECIPE = "recipe.yaml"
RESULT = "result.json"
METRICS = "metrics.jsonl"
MODEL = "model"
ADAPTER = "adapter"
HISTORY = "history.jsonl"
IDENTITY = "track.json"
LATEST = "latest"

# A checkpoint of a run: `step-000200/`.
MANIFEST = "manifest.json"
TRAINER = "trainer.json"

# A comparison: runs are in `arms/ARM/seed-N/`.
PLAN = "plan.json"
ARMS = "arms"
MEASURED = "measured"
CLAIMS = "claims"
MACHINE = "machine.json"
FAILED = "failed.json"
LADDER = "ladder.json"  # two directories up, if the comparison is a rung

# A prepared corpus.
TOKENIZER = "tokenizer"
PUZZLE = "puzzle:"  # prefix of a data set that is generated, not read


def step_name(step: int) -> str:
    """The directory of a run's checkpoint."""
    return f"step-{step:06d}"


def step_number(name: str) -> int | None:
    """The step in a checkpoint directory's name; None for other names."""
    number = name.removeprefix("step-")
    return int(number) if name.startswith("step-") and number.isdigit() else None


def run_and_step(where: str | Path) -> tuple[Path, int | None] | None:
    """The run, and its step if one is named, in `RUN`, `RUN@step-400` or `RUN/step-000400`; None if the path is not of
    a run."""
    path = Path(where)
    step = step_number(path.name)
    if step is not None and (path / MANIFEST).is_file():
        return path.parent, step
    if (path / RECIPE).is_file():
        return path, None
    run, _, name = str(where).rpartition("@")
    step = step_number(name)
    return (Path(run), step) if step is not None and run and (Path(run) / RECIPE).is_file() else None
