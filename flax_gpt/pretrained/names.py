"""Between the parameter tree and GPT-2's published tensors: their names, their shapes, one tensor a layer.

Published kernels are stored (in, out), as they are here, so nothing is transposed. The columns of `c_attn` are queries,
keys and values, head by head within each, which is the order of the axes of `qkv`: [d, 3d] reshapes to [d, 3, h, k].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params

_PREFIX = "transformer."
# Buffers in some published files: causal masks, which are no parameters.
_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")

# Path below "blocks" -> name below "h.N.".
_BLOCK_NAMES = {
    ("ln_1", "scale"): "ln_1.weight",
    ("ln_1", "bias"): "ln_1.bias",
    ("attn", "qkv", "kernel"): "attn.c_attn.weight",
    ("attn", "qkv", "bias"): "attn.c_attn.bias",
    ("attn", "out", "kernel"): "attn.c_proj.weight",
    ("attn", "out", "bias"): "attn.c_proj.bias",
    ("ln_2", "scale"): "ln_2.weight",
    ("ln_2", "bias"): "ln_2.bias",
    ("mlp", "up", "kernel"): "mlp.c_fc.weight",
    ("mlp", "up", "bias"): "mlp.c_fc.bias",
    ("mlp", "down", "kernel"): "mlp.c_proj.weight",
    ("mlp", "down", "bias"): "mlp.c_proj.bias",
}
_OTHER_NAMES = {
    ("wte",): "wte.weight",
    ("wpe",): "wpe.weight",
    ("ln_f", "scale"): "ln_f.weight",
    ("ln_f", "bias"): "ln_f.bias",
}


def _block_shapes(config: GPTConfig) -> dict[tuple[str, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Path -> (shape of one layer here, shape of it as published)."""
    d, f, h, k = config.n_embd, config.mlp_width, config.n_head, config.head_width
    plain = {
        ("ln_1", "scale"): (d,), ("ln_1", "bias"): (d,), ("ln_2", "scale"): (d,), ("ln_2", "bias"): (d,),
        ("attn", "out", "bias"): (d,), ("mlp", "up", "kernel"): (d, f), ("mlp", "up", "bias"): (f,),
        ("mlp", "down", "kernel"): (f, d), ("mlp", "down", "bias"): (d,),
    }  # fmt: skip
    return {
        **{path: (shape, shape) for path, shape in plain.items()},
        ("attn", "qkv", "kernel"): ((d, 3, h, k), (d, 3 * d)),
        ("attn", "qkv", "bias"): ((3, h, k), (3 * d,)),
        ("attn", "out", "kernel"): ((h, k, d), (d, d)),
    }


def _other_shapes(config: GPTConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    d, v = config.n_embd, config.vocab_size
    return {("wte",): (v, d), ("wpe",): (config.n_positions, d), ("ln_f", "scale"): (d,), ("ln_f", "bias"): (d,)}


def to_gpt2_names(config: GPTConfig, params: Params) -> dict[str, np.ndarray]:
    """The tensors that Hugging Face's `GPT2LMHeadModel` holds, on the host, in the parameters' dtype.

    Without a bias on queries, keys and values (`qkv_bias=False`) that bias is written as zeros: the same function.
    """
    tensors = {_PREFIX + name: np.asarray(_at(params, path)) for path, name in _OTHER_NAMES.items()}
    for path, (_, published) in _block_shapes(config).items():
        if path == ("attn", "qkv", "bias") and not config.qkv_bias:
            stack = np.zeros((config.n_layer, *published), tensors[_PREFIX + "wte.weight"].dtype)
        else:
            stack = np.asarray(_at(params["blocks"], path)).reshape(config.n_layer, *published)
        for layer in range(config.n_layer):
            tensors[f"{_PREFIX}h.{layer}.{_BLOCK_NAMES[path]}"] = stack[layer]
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = np.ascontiguousarray(np.asarray(params["head"]["kernel"]).T)
    return tensors


def from_gpt2_names(config: GPTConfig, tensors: Mapping[str, Any]) -> Params:
    """The parameter tree of published tensors.

    Args:
        config: what they should be the weights of.
        tensors: from name, with or without the prefix "transformer.", to array. They are read one at a time, so that
            the mapping may fetch each when asked.

    Returns:
        A nested dict of NumPy arrays in the tensors' dtype.

    Raises:
        ValueError: tensors are missing, or there are others, or some have another shape; all are listed.
    """
    found = {name.removeprefix(_PREFIX): name for name in tensors}
    found = {name: key for name, key in found.items() if not _MASKS.fullmatch(name)}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # a copy of wte in some files
    expected = dict(_expected(config))
    problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in found]
    problems += [f"not of this model: {name}" for name in found if name not in expected]
    for name, shape in expected.items():
        if name in found and tuple(tensors[found[name]].shape) != shape:
            problems.append(f"{name} has shape {tuple(tensors[found[name]].shape)}, expected {shape}")
    if problems:
        raise ValueError("the weights do not fit the config:\n  " + "\n  ".join(problems))

    params: dict[str, Any] = {"blocks": {}}
    for path, name in _OTHER_NAMES.items():
        _put(params, path, np.asarray(tensors[found[name]]))
    for path, (shape, _) in _block_shapes(config).items():
        stack: np.ndarray | None = None
        for layer in range(config.n_layer):
            tensor = np.asarray(tensors[found[f"h.{layer}.{_BLOCK_NAMES[path]}"]]).reshape(shape)
            if stack is None:
                stack = np.empty((config.n_layer, *shape), tensor.dtype)
            stack[layer] = tensor
        if path == ("attn", "qkv", "bias") and not config.qkv_bias:
            if np.any(stack):
                raise ValueError("the weights have a bias on queries, keys and values; the config has qkv_bias=False")
            continue
        _put(params["blocks"], path, stack)
    if not config.tie_word_embeddings:
        params["head"] = {"kernel": np.ascontiguousarray(np.asarray(tensors[found["lm_head.weight"]]).T)}
    return params


def _expected(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    shapes = _other_shapes(config)
    for path, name in _OTHER_NAMES.items():
        yield name, shapes[path]
    for layer in range(config.n_layer):
        for path, (_, published) in _block_shapes(config).items():
            yield f"h.{layer}.{_BLOCK_NAMES[path]}", published
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.n_embd)


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
