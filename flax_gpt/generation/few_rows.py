"""Matrix products with few rows, which is all of decoding: on a CPU up to twice as fast from matrices stored [out, in].

Decoding reads every weight for a handful of rows. On two cores of an Intel Xeon, all of gpt2's matrices in float32 take
36 ms for one row and 73 to 90 ms for eight the plain way, x [rows, in] times kernel [in, out]; with the matrix on the
left, [out, in] times x^T, 33 and 41 to 50, and reading the memory once takes 32. XLA would turn that product round by
itself, which is why its operands and its result are fenced in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from flax_gpt import ops
from flax_gpt.config import GPTConfig
from flax_gpt.model import BlockType, Linear

FEW = 32  # from so many rows on, the plain product is as fast

# Of each `Linear` in a block, by its path there: the shapes of its inputs and of its outputs.
Maps = dict[tuple[str, ...], tuple[tuple[int, ...], tuple[int, ...]]]


def linear_maps(config: GPTConfig, block: BlockType) -> Maps:
    """The `Linear` modules that a block is made of."""
    found: Maps = {}

    def note(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, Linear) and context.method_name == "__call__":
            found[context.module.path] = tuple(context.module.inputs), tuple(context.module.outputs)
        return call(*args, **kwargs)

    module = block(config, parent=None)  # type: ignore[call-arg]  # every linen module takes `parent`
    with nn.intercept_methods(note):
        jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1, config.n_embd)))
    return found


def take_matrices(params: Any, maps: Maps) -> tuple[Any, dict[str, Float[Array, "out in"]]]:
    """A layer's parameters without the kernels of its `Linear` modules, and these as matrices [out, in]."""
    flat = flatten_dict(params)
    matrices = {}
    for path, (inputs, _) in maps.items():
        kernel = flat.pop((*path, "kernel"))
        matrices["/".join(path)] = kernel.reshape(math.prod(inputs), -1).T
    return unflatten_dict(flat), matrices


def put_matrices(params: Any, matrices: Mapping[str, Array], maps: Maps) -> Any:
    """The inverse of `take_matrices`; costs nothing where nobody looks at the kernels."""
    flat = flatten_dict(params)
    for path, (inputs, outputs) in maps.items():
        flat[(*path, "kernel")] = matrices["/".join(path)].T.reshape(*inputs, *outputs)
    return unflatten_dict(flat)


def by_matrices(matrices: Mapping[str, Array]) -> Any:
    """A context in which `Linear` modules multiply few rows by these matrices instead of their kernels."""

    def multiply(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        matrix = matrices.get("/".join(module.path))
        if matrix is None or not isinstance(module, Linear) or context.method_name != "__call__":
            return call(*args, **kwargs)
        x = args[0]
        batch = x.shape[: x.ndim - len(module.inputs)]
        rows = math.prod(batch)
        if not isinstance(rows, int) or rows > FEW:  # it is no int where a shape is symbolic
            return call(*args, **kwargs)
        y = few_rows(x.reshape(rows, -1), matrix).reshape(*batch, *module.outputs)
        if module.use_bias:
            y = y + module.get_variable("params", "bias").astype(y.dtype)
        return y.astype(x.dtype)

    return nn.intercept_methods(multiply)


def few_rows(x: Float[Array, "rows in"], matrix: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    """X matrix^T, in at least float32."""
    if matrix.dtype == jnp.bfloat16:
        # XLA's product of a bfloat16 matrix and one row is slower by ten than the sum it stands for.
        if len(x) == 1:
            return jnp.sum(matrix.astype(jnp.float32) * x.astype(jnp.float32), axis=1)[None]
        return ops.einsum("ri,oi->ro", x, matrix)
    fence = jax.lax.optimization_barrier
    return fence(ops.einsum("oi,ir->or", matrix, fence(x.T))).T
