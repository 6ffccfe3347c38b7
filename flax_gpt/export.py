"""Programs that need neither this package nor Flax to run: `jax.export` of the forward pass and of a decoding step.

    program = fg.export.export_forward(config)
    Path("gpt.bin").write_bytes(program.serialize())
    ...
    program = jax.export.deserialize(Path("gpt.bin").read_bytes())     # in a process that has only JAX
    logits = program.call(params, tokens)

The parameters are arguments, nested dicts and tuples of arrays. Batch size and lengths are left open. To save a program
JAX needs flatbuffers: pip install 'flax_gpt[export]'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params, forward, init_params
from flax_gpt.generation.cache import Cache, Weights, init_cache, logits_of, prepare, read
from flax_gpt.model import Block, BlockType

PLATFORMS = ("cpu", "cuda", "tpu")


def export_forward(
    config: GPTConfig,
    *,
    dtype: Any = jnp.float32,
    compute_dtype: Any = None,
    block: BlockType = Block,
    platforms: Sequence[str] = PLATFORMS,
) -> jax.export.Exported:
    """`forward` as a program of (params, tokens [b, t] int32) -> logits [b, t, v], for any b and t up to n_positions.

    Args:
        config, compute_dtype, block: as of `forward`.
        dtype: of the parameters.
        platforms: to compile it for.
    """
    b, t = jax.export.symbolic_shape("b, t", constraints=[f"t <= {config.n_positions}"])
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype, block))

    def program(params: Params, tokens: Array) -> Array:
        return forward(config, params, tokens, compute_dtype=compute_dtype, block=block)

    return jax.export.export(jax.jit(program), platforms=platforms)(params, jax.ShapeDtypeStruct((b, t), jnp.int32))


def export_decode_step(
    config: GPTConfig,
    *,
    dtype: Any = jnp.float32,
    compute_dtype: Any = None,
    block: BlockType = Block,
    platforms: Sequence[str] = PLATFORMS,
) -> jax.export.Exported:
    """A step of decoding, of (weights, tokens [b] int32, cache) -> (logits [b, v], cache), for any b and any cache.

    Args: as of `export_forward`.

    Returns:
        The program. Its weights are `generation.prepare(config, params, compute_dtype, transposed=False)._asdict()`, so
        that no step takes the parameters apart anew. Its cache is the dict of a `Cache`'s fields: keys and values,
        tuples of [b, h, k, s], one a layer; mask [b, s], True at the slots that are taken; length, an int32. It begins
        as zeros throughout, and each step takes a slot.
    """
    b, s = jax.export.symbolic_shape("b, s")
    weights = jax.eval_shape(
        lambda: prepare(config, init_params(config, jax.random.key(0), dtype, block), compute_dtype, block, False)
    )
    cache = jax.eval_shape(lambda: init_cache(config, 1, 1, compute_dtype or dtype))
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:-1], s) if x.ndim else (), x.dtype), cache)

    def program(weights: dict[str, Any], tokens: Array, cache: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        ready = Weights(**weights)
        here = jnp.ones((*tokens.shape, 1), bool)
        x, after = read(config, ready, tokens[:, None], here, Cache(**cache), None, block)
        return logits_of(config, ready, x, None)[:, 0], after._asdict()

    return jax.export.export(jax.jit(program), platforms=platforms)(
        weights._asdict(), jax.ShapeDtypeStruct((b,), jnp.int32), cache._asdict()
    )
