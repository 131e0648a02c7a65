"""Training: `train` for a whole run, `build_training` to drive the steps yourself.

- `loop.py`: a run from start to end: refusals, resuming, signals, too many skipped steps, the export of the model.
- `build.py`: a step: its micro-batches, its loss, its random seeds; the initial weights.
- `first_steps.py`: stops a run whose first batch has another loss in evaluation, or whose loss rises after a start.
- `guard.py`: which steps are skipped. `optimizer.py`: what trains, with which optimizer, weight decay and schedule.
- `muon.py`, `adamw.py`: the optimizers' steps. `adapters.py`: LoRA. `distill.py`: a teacher.
- `kvcache.py`: training under a compressed KV cache.
- `branching.py`: what a branch copies and may change. `checkpoint.py`: how a checkpoint is written.
- `source.py`: opens `model.from_pretrained` and a teacher. `same_tokenizer.py`: refuses a corpus of another tokenizer.
- `parallel.py`: ranks, devices, FSDP2, compilation. `hooks.py`: callbacks. `callback.py`: for transformers' Trainer.
- `heldout.py`: evaluation. `jacobi_gap.py`: its gap to decoding, for models that read text by Jacobi rounds.
- `meter.py`: speed and MFU. `tracking.py`: `metrics.jsonl` and trackers.
- `estimate.py`: `--dry-run`. `trained_flops.py`: FLOPs with frozen weights or adapters.
- `probe.py`: the learning-rate probe. `results.py`: the fields of `result.json`.
"""

from fathom.errors import TrainingError
from fathom.training.branching import Branch, branch, read_history
from fathom.training.build import Training, build_training
from fathom.training.heldout import evaluate
from fathom.training.hooks import Hook
from fathom.training.loop import TrainResult, train
from fathom.training.parallel import Ranks, start
from fathom.training.results import Evaluation, Score
from fathom.training.tracking import read_metrics

__all__ = [
    "Branch",
    "Evaluation",
    "Hook",
    "Ranks",
    "Score",
    "StepMetrics",
    "TrainResult",
    "Training",
    "TrainingError",
    "branch",
    "build_training",
    "evaluate",
    "read_history",
    "read_metrics",
    "start",
    "train",
]
