"""Names of the files in a model directory, a run and a comparison, each spelled once."""

from __future__ import annotations

from fathom.report import PAGE as PAGE
from fathom.report import REPORT as REPORT

# A model directory, in Hugging Face's format.
CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
INDEX = WEIGHTS + ".index.json"
INDEX_SUFFIX = ".safetensors.index.json"

# A run: `runs/NAME/`.
RECIPE = "recipe.yaml"
RESULT = "result.json"
METRICS = "metrics.jsonl"
MODEL = "model"
LOCK = ".lock"
IDENTITY = "track.json"
LATEST = "latest"

# A checkpoint of a run: `step-000200/`.
MANIFEST = "manifest.json"
TRAINER = "trainer.json"

# A comparison: runs lie in `arms/ARM/seed-N/`.
PLAN = "plan.json"
ARMS = "arms"
MEASURED = "measured"
CLAIMS = "claims"
MACHINE = "machine.json"
FAILED = "failed.json"
LOOKS = "looks.json"

# A prepared corpus.
TOKENIZER = "tokenizer"


def step_name(step: int) -> str:
    """The directory of a run's checkpoint."""
    return f"step-{step:06d}"


def step_number(name: str) -> int | None:
    """The step that a directory's name stands for, if it is a checkpoint's."""
    number = name.removeprefix("step-")
    return int(number) if name.startswith("step-") and number.isdigit() else None
