"""Between the parameter tree and GPT-2's published tensors: their names, their shapes, one tensor a layer.

Published kernels are stored (in, out), as they are here, so nothing is transposed but an untied head. The columns of
`c_attn` are queries, keys and values, head by head within each, which is the order of the axes of `qkv`: [d, 3d]
reshapes to [d, 3, h, k].
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params

_PREFIX = "transformer."
# Buffers in some published files: causal masks, which are no parameters.
_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_HEAD = "lm_head.weight"
QKV_BIAS = ("blocks", "attn", "qkv", "bias")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the parameter tree and the published tensors that it is made of.

    Attributes:
        path: of the leaf.
        shape: of the leaf.
        names: of the tensors, without the prefix: one, or one a layer, stacked in this order.
        stored: the shape of each tensor.
        transposed: whether a tensor is the leaf's transpose.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...]
    stored: tuple[int, ...]
    transposed: bool = False


def published_leaves(config: GPTConfig) -> list[Leaf]:
    """All leaves of a GPT's parameters, and a bias of queries, keys and values also where the config has none."""
    d, f, h, k, v, n = (
        config.n_embd, config.mlp_width, config.n_head, config.head_width, config.vocab_size, config.n_layer,
    )  # fmt: skip

    def single(path: str, name: str, *shape: int) -> Leaf:
        return Leaf(tuple(path.split(".")), shape, (name,), shape)

    def stack(path: str, name: str, stored: tuple[int, ...], layer: tuple[int, ...] | None = None) -> Leaf:
        names = tuple(f"h.{i}.{name}" for i in range(n))
        return Leaf(("blocks", *path.split(".")), (n, *(layer or stored)), names, stored)

    leaves = [
        single("wte", "wte.weight", v, d),
        single("wpe", "wpe.weight", config.n_positions, d),
        stack("ln_1.scale", "ln_1.weight", (d,)),
        stack("ln_1.bias", "ln_1.bias", (d,)),
        stack("attn.qkv.kernel", "attn.c_attn.weight", (d, 3 * d), (d, 3, h, k)),
        stack("attn.qkv.bias", "attn.c_attn.bias", (3 * d,), (3, h, k)),
        stack("attn.out.kernel", "attn.c_proj.weight", (d, d), (h, k, d)),
        stack("attn.out.bias", "attn.c_proj.bias", (d,)),
        stack("ln_2.scale", "ln_2.weight", (d,)),
        stack("ln_2.bias", "ln_2.bias", (d,)),
        stack("mlp.up.kernel", "mlp.c_fc.weight", (d, f)),
        stack("mlp.up.bias", "mlp.c_fc.bias", (f,)),
        stack("mlp.down.kernel", "mlp.c_proj.weight", (f, d)),
        stack("mlp.down.bias", "mlp.c_proj.bias", (d,)),
        single("ln_f.scale", "ln_f.weight", d),
        single("ln_f.bias", "ln_f.bias", d),
    ]
    if not config.tie_word_embeddings:
        leaves.append(Leaf(("head", "kernel"), (d, v), (_HEAD,), (v, d), transposed=True))
    return leaves


def to_gpt2_names(config: GPTConfig, params: Params) -> dict[str, np.ndarray]:
    """The tensors that Hugging Face's `GPT2LMHeadModel` holds, on the host, in the parameters' dtype.

    Without a bias on queries, keys and values (`qkv_bias=False`) that bias is written as zeros: the same function.
    """
    tensors: dict[str, np.ndarray] = {}
    for leaf in published_leaves(config):
        if leaf.path == QKV_BIAS and not config.qkv_bias:
            stack = np.zeros((config.n_layer, *leaf.stored), params["wte"].dtype)
        elif leaf.transposed:
            stack = np.ascontiguousarray(np.asarray(at_path(params, leaf.path)).T)[None]
        else:
            stack = np.asarray(at_path(params, leaf.path)).reshape(len(leaf.names), *leaf.stored)
        for name, tensor in zip(leaf.names, stack, strict=True):
            tensors[name if name == _HEAD else _PREFIX + name] = tensor
    return tensors


def from_gpt2_names(
    config: GPTConfig,
    tensors: Mapping[str, Any],
    dtype: Any = None,
    place: Callable[[Leaf, np.ndarray], Any] | None = None,
) -> Params:
    """The parameter tree of published tensors.

    Args:
        config: what they should be the weights of.
        tensors: from name, with or without the prefix "transformer.", to what has a `shape` and becomes an array by
            `numpy.asarray`. Each is made one when its turn has come and dropped before the next, so that tensors in
            files cost the memory of one of them.
        dtype: of the parameters; None keeps the tensors'.
        place: given each leaf when it is complete, the largest first; what it returns stands in the tree in its stead.

    Returns:
        A nested dict of NumPy arrays, or of what `place` returned.

    Raises:
        ValueError: tensors are missing, or there are others, or some have another shape (all are listed); a tied head
            differs from the token embedding; a tensor is not of floating point, or does not fit into the dtype; layers
            have different dtypes, and none was given.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"the dtype of parameters must be of floating point, got {np.dtype(dtype)}")
    found = _check(config, tensors)
    params: dict[str, Any] = {}
    # Where `place` copies, the leaf that is being read is there twice; in this order that costs least.
    for leaf in sorted(published_leaves(config), key=lambda leaf: -math.prod(leaf.shape)):
        array = _read(leaf, found, dtype)
        if leaf.path == QKV_BIAS and not config.qkv_bias:
            if np.any(array):
                raise ValueError("the weights have a bias on queries, keys and values; the config has qkv_bias=False")
            continue
        put_path(params, leaf.path, array if place is None else place(leaf, array))
        del array  # or it would be there until the next one is complete
    return params


def _check(config: GPTConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by their names without prefix, less masks and a tied head; raises where they do not fit."""
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    found = {name: tensor for name, tensor in found.items() if not _MASKS.fullmatch(name)}
    head = found.pop(_HEAD, None) if config.tie_word_embeddings else None
    if head is not None:  # a file may hold the shared matrix under either name
        found.setdefault("wte.weight", head)
    expected = {name: leaf.stored for leaf in published_leaves(config) for name in leaf.names}
    problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in found]
    problems += [f"not of this model: {name}" for name in found if name not in expected]
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(found[name].shape)}, expected {shape}")
    # Other files hold it under both. Dropping a head that differs would be dropping a part of the function.
    if head is not None and not _same(head, found["wte.weight"]):
        problems.append(
            f"{_HEAD} is not equal to wte.weight, and the config has tie_word_embeddings=True; to have it as the head, "
            "set tie_word_embeddings to false in config.json"
        )
    if problems:
        raise ValueError("the weights do not fit the config:\n  " + "\n  ".join(problems))
    return found


def _same(tensor: Any, other: Any) -> bool:
    if tensor is other:
        return True
    if tuple(tensor.shape) != tuple(other.shape):
        return False
    first, second = np.ascontiguousarray(tensor), np.ascontiguousarray(other)
    # By their bytes: a NaN is equal to itself, and no copy is made.
    return first.dtype == second.dtype and np.array_equal(first.view(np.uint8), second.view(np.uint8))


def _read(leaf: Leaf, tensors: Mapping[str, Any], dtype: Any) -> np.ndarray:
    """A leaf, cast tensor by tensor: there is never a stack in the file's dtype beside one in the other."""
    stored = leaf.stored[::-1] if leaf.transposed else leaf.stored
    stack = np.empty(0)
    for i, name in enumerate(leaf.names):
        tensor = np.asarray(tensors[name])
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"{name} holds {tensor.dtype}, no floating-point numbers")
        if i == 0:
            stack = _empty((len(leaf.names), *stored), np.dtype(tensor.dtype if dtype is None else dtype))
        elif dtype is None and tensor.dtype != stack.dtype:
            raise ValueError(f"{name} holds {tensor.dtype} and {leaf.names[0]} {stack.dtype}; give the dtype to have")
        try:
            with np.errstate(over="raise"):
                stack[i] = tensor.T if leaf.transposed else tensor
        except FloatingPointError:
            raise ValueError(f"{name} holds numbers too large for {stack.dtype}") from None
    return stack.reshape(leaf.shape)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`numpy.empty` that begins at a multiple of 64 bytes, so that JAX on a CPU takes it over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def at_path(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def put_path(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Puts a leaf into a nested dict, and the dicts on the way to it."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
