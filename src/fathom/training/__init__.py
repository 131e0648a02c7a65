"""Training: `train` for a whole run, `build_training` to drive the steps yourself."""

from fathom.training.build import StepMetrics, Training, build_training
from fathom.training.checkpoint import CheckpointError
from fathom.training.heldout import Evaluation, Score, evaluate
from fathom.training.loop import TrainingError, TrainResult, train
from fathom.training.parallel import Ranks, start
from fathom.training.tracking import Tracker, read_metrics

__all__ = [
    "CheckpointError",
    "Evaluation",
    "Ranks",
    "Score",
    "StepMetrics",
    "Tracker",
    "TrainResult",
    "Training",
    "TrainingError",
    "build_training",
    "evaluate",
    "read_metrics",
    "start",
    "train",
]
