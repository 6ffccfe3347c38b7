"""How fast this machine multiplies matrices, measured: what model FLOPs utilisation is a share of."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_gpt import ops

# Products this large are limited by arithmetic alone: a CPU's cores are busy, and an accelerator's launch costs little.
SIZE_ON_CPU, SIZE_ELSEWHERE = 1024, 8192


def measure_peak_flops(dtype: Any = jnp.float32, *, size: int | None = None, seconds: float = 0.25) -> float:
    """The rate of a large square matrix product on one device, in floating-point operations a second.

    It is the rate of the package's own product (operands of `dtype`, accumulated in at least float32), the best of
    several batches, and not the maker's figure, which no product reaches. The products of a model are smaller than
    these, so that a training step which comes to half of it is a good one; a share above 1 means that something else
    kept the machine busy while it was measured. It takes `seconds` and a compilation.

    Args:
        dtype: the compute dtype of the model.
        size: rows and columns of the matrices.
        seconds: how long to go on measuring; there are three batches at least.
    """
    if size is None:
        size = SIZE_ON_CPU if jax.default_backend() == "cpu" else SIZE_ELSEWHERE
    # Random numbers: with zeros a processor draws less power, and runs faster than it will in use.
    x, y = jax.random.normal(jax.random.key(0), (2, size, size), jnp.dtype(dtype))
    per_batch = 2
    jax.block_until_ready([_product(x, y) for _ in range(per_batch)])
    rates: list[float] = []
    start = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        # Sent together, so that an accelerator starts on the next while the host hears of the one before.
        jax.block_until_ready([_product(x, y) for _ in range(per_batch)])
        rates.append(per_batch * 2 * size**3 / (time.perf_counter() - before))
    return max(rates)


@jax.jit
def _product(x: Float[Array, "m n"], y: Float[Array, "n p"]) -> Float[Array, "m p"]:
    return ops.einsum("mn,np->mp", x, y)
