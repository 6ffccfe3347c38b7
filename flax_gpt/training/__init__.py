"""Training: a loss, an optimizer, a pure step, a loop around it, and the folder a run leaves behind."""

from flax_gpt.training.checkpoint import Checkpoints
from flax_gpt.training.config import TrainConfig
from flax_gpt.training.evaluate import evaluate, exam_score
from flax_gpt.training.loop import FitResult, fit
from flax_gpt.training.loss import next_token_loss
from flax_gpt.training.optimizer import decay_mask, learning_rate_schedule, make_optimizer
from flax_gpt.training.step import TrainState, init_state, make_train_step, train_step
from flax_gpt.training.sweep import SweepResult, fit_many

__all__ = [
    "Checkpoints",
    "FitResult",
    "SweepResult",
    "TrainConfig",
    "TrainState",
    "decay_mask",
    "evaluate",
    "exam_score",
    "fit",
    "fit_many",
    "init_state",
    "learning_rate_schedule",
    "make_optimizer",
    "make_train_step",
    "next_token_loss",
    "train_step",
]
