"""Training: `train` for a whole run, `build_training` to drive the steps yourself."""

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
