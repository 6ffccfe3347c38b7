"""Parameter trees that compute the same function and are simpler to look at; nothing here is ever done unasked.

Each takes GPT-2's own pre-LN block and returns new parameters; logits stay what they were up to rounding (of
`center_writes`, up to epsilon's share as well, which does not change: LayerNorm takes the mean off anyway).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flax_gpt.config import GPTConfig
from flax_gpt.forward import Params


def fold_layer_norm(config: GPTConfig, params: Params) -> tuple[GPTConfig, Params]:
    """Moves the scale and shift of ln_1 and ln_2 into the matrices that read them, leaving 1 and 0.

    W' = scale W and b' = b + shift W, so that queries, keys, values and hidden units read the normalised stream itself.
    ln_f is left alone: the tied embedding that reads it is an embedding too.

    Returns:
        A config, which has qkv_bias on where the shift made one necessary, and the parameters.
    """
    blocks = params["blocks"]
    qkv, up = blocks["attn"]["qkv"], blocks["mlp"]["up"]
    ln_1, ln_2 = blocks["ln_1"], blocks["ln_2"]
    shift = jnp.einsum("ld,ldchk->lchk", ln_1["bias"], qkv["kernel"])
    new_qkv = {
        "kernel": jnp.einsum("ld,ldchk->ldchk", ln_1["scale"], qkv["kernel"]),
        "bias": shift + qkv.get("bias", 0),
    }
    new_up = {
        "kernel": jnp.einsum("ld,ldf->ldf", ln_2["scale"], up["kernel"]),
        "bias": jnp.einsum("ld,ldf->lf", ln_2["bias"], up["kernel"]) + up["bias"],
    }

    def plain(norm: dict[str, Any]) -> dict[str, Any]:
        return {"scale": jnp.ones_like(norm["scale"]), "bias": jnp.zeros_like(norm["bias"])}

    folded = {
        **blocks,
        "ln_1": plain(ln_1),
        "ln_2": plain(ln_2),
        "attn": {**blocks["attn"], "qkv": new_qkv},
        "mlp": {**blocks["mlp"], "up": new_up},
    }
    return dataclasses.replace(config, qkv_bias=True), {**params, "blocks": folded}


def fold_value_bias(config: GPTConfig, params: Params) -> Params:
    """Moves the bias of the values into attention's output bias: a pattern sums to 1, so it arrives whatever it is.

    b_O' = b_O + b_V W_O, and b_V' = 0. Not for padding, whose queries see nothing: what they put out, which nothing
    reads, changes.
    """
    if not config.qkv_bias:
        return params
    attn = params["blocks"]["attn"]
    bias, out = attn["qkv"]["bias"], attn["out"]
    moved = {
        "qkv": {**attn["qkv"], "bias": bias.at[:, 2].set(0)},
        "out": {**out, "bias": out["bias"] + jnp.einsum("lhk,lhkd->ld", bias[:, 2], out["kernel"])},
    }
    return {**params, "blocks": {**params["blocks"], "attn": {**attn, **moved}}}


def center_writes(params: Params) -> Params:
    """Takes the mean over the model's width off all that writes to the stream: LayerNorm, its only reader, does so too.

    The embeddings are left alone where the logits are read off them as well: centring tokens changes all logits of a
    position by the same amount, which no probability notices, and which this does not do.
    """

    def centred(linear: dict[str, Any]) -> dict[str, Any]:
        return jax.tree.map(lambda x: x - jnp.mean(x, axis=-1, keepdims=True), linear)

    blocks = params["blocks"]
    attn, mlp = blocks["attn"], blocks["mlp"]
    return {
        **params,
        "wpe": params["wpe"] - jnp.mean(params["wpe"], axis=-1, keepdims=True),
        "blocks": {
            **blocks,
            "attn": {**attn, "out": centred(attn["out"])},
            "mlp": {**mlp, "down": centred(mlp["down"])},
        },
    }
