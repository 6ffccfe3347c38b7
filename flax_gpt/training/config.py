"""The numbers of a training run."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train; the defaults are nanoGPT's for a small character model on a CPU.

    Attributes:
        seed: of the initial parameters, the order of the data and dropout.
        steps: number of updates.
        batch_size: sequences in each.
        lr: learning rate at the end of the warm-up.
        min_lr: learning rate at the end of the run.
        warmup_steps: of linear warm-up; then a cosine falls from lr to min_lr.
        beta1, beta2: AdamW's decay rates of the gradient's first and second moments.
        weight_decay: AdamW's, on matrices and embeddings alone.
        clip_norm: gradients of a larger global norm are scaled down to it.
        compute_dtype: of activations and matrix products; parameters and optimizer state stay float32.
        layers: how the model walks its layers (see `flax_gpt.GPT`).
        remat: whether it computes activations again in the backward pass, to save memory.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations.
        eval_batches: batches in each of them; the one at the end of a run uses all there are.
    """

    seed: int = 1337
    steps: int = 2000
    batch_size: int = 12
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    layers: Literal["auto", "scan", "unroll"] = "auto"
    remat: bool = False
    log_every: int = 10
    eval_every: int = 250
    eval_batches: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "eval_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seed", "warmup_steps", "lr", "min_lr", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps must be below steps, got warmup_steps={self.warmup_steps} and steps={self.steps}"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must not be above lr, got min_lr={self.min_lr} and lr={self.lr}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0 (inf: no clipping), got {self.clip_norm}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype must be float32 or bfloat16, got {self.compute_dtype!r}")

    @property
    def forward_options(self) -> dict[str, object]:
        """The keyword arguments of `flax_gpt.forward` that a run sets."""
        return {"compute_dtype": self.compute_dtype, "layers": self.layers, "remat": self.remat}
