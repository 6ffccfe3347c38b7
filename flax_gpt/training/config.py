"""The numbers of a training run."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train; the defaults are nanoGPT's for a small character model on a CPU.

    Attributes:
        seed: of the initial parameters, the order of the data and dropout.
        steps: number of updates.
        batch_size: sequences in each.
        micro_batches: equal parts that a batch is computed in, one after the other, to save memory.
        optimizer: "adamw", "lion" or "muon" (see `make_optimizer`).
        schedule: how the learning rate falls from lr to min_lr after the warm-up: "cosine", "linear", "trapezoid" or
            "constant" (see `learning_rate_schedule`).
        lr: learning rate at the end of the warm-up.
        min_lr: learning rate at the end of the run.
        warmup_steps: of linear warm-up.
        cooldown_steps: length of the trapezoid's fall; None is a fifth of the steps.
        beta1, beta2: decay rates of the gradient's first and second moments in AdamW; Lion's two rates.
        momentum: Muon's.
        weight_decay: on matrices and embeddings alone, times the learning rate.
        clip_norm: gradients of a larger global norm are scaled down to it.
        ema_decay: of an exponential moving average of the parameters, which is then what is evaluated and kept; None
            keeps the parameters of the last step.
        max_skipped: a step whose loss or gradient is not finite changes nothing but is counted; a run stops when it has
            had more than so many.
        loss_chunk: positions of each sequence whose logits are held at once; None chooses by size (see
            `next_token_loss`).
        compute_dtype: of activations and matrix products; parameters and optimizer state stay float32.
        layers: how the model walks its layers (see `flax_gpt.GPT`).
        remat: whether it computes activations again in the backward pass, to save memory.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations.
        eval_batches: batches in each of them; the one at the end of a run uses all there are.
        checkpoint_every: steps between two checkpoints, where the run has a folder; None leaves none.
        keep_checkpoints: how many of the latest are kept; the one with the lowest validation loss is kept besides.
    """

    seed: int = 1337
    steps: int = 2000
    batch_size: int = 12
    micro_batches: int = 1
    optimizer: Literal["adamw", "lion", "muon"] = "adamw"
    schedule: Literal["cosine", "linear", "trapezoid", "constant"] = "cosine"
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 100
    cooldown_steps: int | None = None
    beta1: float = 0.9
    beta2: float = 0.99
    momentum: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float | None = None
    max_skipped: int = 10
    loss_chunk: int | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    layers: Literal["auto", "scan", "unroll"] = "auto"
    remat: bool = False
    log_every: int = 10
    eval_every: int = 250
    eval_batches: int = 10
    checkpoint_every: int | None = 250
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "micro_batches",
            "log_every",
            "eval_every",
            "eval_batches",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cooldown_steps", "loss_chunk", "checkpoint_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be None or at least 1, got {getattr(self, name)}")
        for name in ("seed", "warmup_steps", "lr", "min_lr", "weight_decay", "max_skipped"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"batch_size must be a multiple of micro_batches, got batch_size={self.batch_size} and "
                f"micro_batches={self.micro_batches}"
            )
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps must be below steps, got warmup_steps={self.warmup_steps} and steps={self.steps}"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must not be above lr, got min_lr={self.min_lr} and lr={self.lr}")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be None or between 0 and 1, got {self.ema_decay}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0 (inf: no clipping), got {self.clip_norm}")
        for name, known in (
            ("optimizer", ("adamw", "lion", "muon")),
            ("schedule", ("cosine", "linear", "trapezoid", "constant")),
            ("compute_dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def forward_options(self) -> dict[str, Any]:
        """The keyword arguments of `flax_gpt.forward` that a run sets."""
        return {"compute_dtype": self.compute_dtype, "layers": self.layers, "remat": self.remat}

    @property
    def step_options(self) -> dict[str, Any]:
        """The keyword arguments of `train_step` that a run sets, those for `flax_gpt.forward` included."""
        names = ("micro_batches", "ema_decay", "loss_chunk")
        return {**self.forward_options, **{name: getattr(self, name) for name in names}}
