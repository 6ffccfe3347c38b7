"""What a model costs: parameters, floating-point operations and memory, counted and not measured.

Axes are written as in `flax_gpt.ops`; t is the length of the sequence.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from flax_gpt.config import GPTConfig
from flax_gpt.forward import init_params
from flax_gpt.model import Block, BlockType


def count_params(config: GPTConfig, block: BlockType = Block) -> int:
    """Number of parameters; 124,439,808 for gpt2. The tied head counts once. Nothing is allocated."""
    return sum(params_by_group(config, block).values())


def params_by_group(config: GPTConfig, block: BlockType = Block) -> dict[str, int]:
    """Number of parameters of each part of the tree, such as "wte", "blocks.attn" (all layers together) and "ln_f"."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), block=block))
    groups: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        keys = [entry.key for entry in path]
        group = ".".join(keys[:2]) if keys[0] == "blocks" else keys[0]
        groups[group] = groups.get(group, 0) + math.prod(leaf.shape)
    return groups


def flops_by_part(config: GPTConfig, t: int) -> dict[str, int]:
    """Floating-point operations of the forward pass over one sequence of t tokens, by part.

    Counted as nanoGPT's sizing notebook counts: a product of [m, n] and [n, p] is 2 m n p; biases, LayerNorm, softmax
    and the embedding look-up are not counted; attention is counted in full, the masked half included. The blocks' parts
    are those of all layers together. The head costs the same whether it is tied or not.
    """
    d, f, v, layers = config.n_embd, config.mlp_width, config.vocab_size, config.n_layer
    return {
        "attn.qkv": layers * 2 * t * d * 3 * d,
        "attn.scores": layers * 2 * t * t * d,
        "attn.mix": layers * 2 * t * t * d,
        "attn.out": layers * 2 * t * d * d,
        "mlp.up": layers * 2 * t * d * f,
        "mlp.down": layers * 2 * t * f * d,
        "head": 2 * t * d * v,
    }


def count_flops(config: GPTConfig, t: int) -> int:
    """Floating-point operations of the forward pass over one sequence of t tokens (see `flops_by_part`).

    A backward pass takes twice as many, so a training step takes three times this a sequence.
    """
    if not 1 <= t <= config.n_positions:
        raise ValueError(f"t must be from 1 to n_positions={config.n_positions}, got {t}")
    return sum(flops_by_part(config, t).values())


def palm_flops(config: GPTConfig, t: int) -> int:
    """Forward and backward over one sequence by the rule of thumb 6 N + 12 l h k t a token.

    Chowdhery et al. 2022 (arXiv 2204.02311), appendix B. N leaves out positions and biases, which take part in no
    matrix product.
    """
    d, f, v = config.n_embd, config.mlp_width, config.vocab_size
    weights = v * d * (1 if config.tie_word_embeddings else 2) + config.n_layer * (4 * d * d + 2 * d * f + 2 * d) + d
    return t * (6 * weights + 12 * config.n_layer * d * t)


def flops_utilisation(config: GPTConfig, t: int, tokens_per_second: float, peak_flops: float) -> float:
    """Model FLOPs utilisation of a training run: the share of the machine's peak that went into the model's own work.

    Args:
        config, t: the model, and the length of the sequences it trains on.
        tokens_per_second: measured.
        peak_flops: of the machine, in floating-point operations a second.
    """
    return 3 * count_flops(config, t) / t * tokens_per_second / peak_flops


def memory_by_use(
    config: GPTConfig, batch_size: int, t: int, *, param_dtype: Any = jnp.float32, compute_dtype: Any = jnp.float32
) -> dict[str, int]:
    """Bytes that a training step with AdamW must hold at its peak, by use, without remat.

    "activations" counts each array that the backward pass reads, once: an estimate, since the compiler keeps some
    twice, fuses others away, and needs room to work in. `jax.jit(step).lower(...).compile().memory_analysis()` gives
    what it settled on.
    """
    d, f, h, b = config.n_embd, config.mlp_width, config.n_head, batch_size
    n_params = count_params(config)
    param_size, size, wide = jnp.dtype(param_dtype).itemsize, jnp.dtype(compute_dtype).itemsize, 4
    # Of a token: stream and LayerNorm output (twice), q, k, v, z, both sides of the non-linearity. Of a pair: pattern.
    of_block = b * t * (8 * d + 2 * f) * size + b * h * t * t * wide
    return {
        "params": n_params * param_size,
        "grads": n_params * param_size,
        "adam": 2 * n_params * param_size,
        "activations": config.n_layer * of_block + 2 * b * t * d * size,
        "logits": 2 * b * t * config.vocab_size * wide,
    }
