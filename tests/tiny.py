"""The model of the tests: every axis of another prime size, so that no two can be exchanged unnoticed.

Parameters are random in every leaf, biases and LayerNorms included: at their initial 0 and 1 those would test nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flax_gpt import Block, GPTConfig, init_params

SIZES = {"vocab_size": 61, "n_positions": 17, "n_embd": 21, "n_layer": 2, "n_head": 3, "n_inner": 29}
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
CONFIG = GPTConfig(**SIZES, **NO_DROPOUT)
BATCH, T = 2, 11


def random_params(config=CONFIG, seed=0, dtype=np.float32, block=Block):
    """A parameter tree with N(0, 0.3^2) in every leaf, around 1 in the LayerNorm scales; float32-representable."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), block=block))

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray((centre + 0.3 * rng.standard_normal(leaf.shape)).astype(np.float32), dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_tokens(config=CONFIG, shape=(BATCH, T), seed=0):
    """Ids in the vocabulary, on the device."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape), jnp.int32)


def to_float64(tree):
    """The tree as the NumPy oracle takes it."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def draw(*shape, dtype=np.float32, seed=0):
    """Standard normal numbers, on the device."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
