"""Folded parameters compute the same function, in float64 to rounding, and are as simple as they claim."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_params, random_tokens

from flax_gpt import forward
from flax_gpt.interp import center_writes, fold_layer_norm, fold_value_bias

TOKENS = random_tokens()
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_layer_norm_is_folded(x64, qkv_bias):
    config = dataclasses.replace(CONFIG, qkv_bias=qkv_bias)
    params = random_params(config, dtype=np.float64)
    folded_config, folded = fold_layer_norm(config, params)
    for name in ("ln_1", "ln_2"):
        assert (folded["blocks"][name]["scale"] == 1).all()
        assert (folded["blocks"][name]["bias"] == 0).all()
    assert folded_config == dataclasses.replace(config, qkv_bias=True)
    np.testing.assert_allclose(forward(folded_config, folded, TOKENS), forward(config, params, TOKENS), **EXACT)
    assert not (params["blocks"]["ln_1"]["scale"] == 1).any()  # what came in is as it was


def test_the_value_bias_is_folded(x64):
    params = random_params(dtype=np.float64)
    folded = fold_value_bias(CONFIG, params)
    assert (folded["blocks"]["attn"]["qkv"]["bias"][:, 2] == 0).all()
    assert (folded["blocks"]["attn"]["qkv"]["bias"][:, :2] == params["blocks"]["attn"]["qkv"]["bias"][:, :2]).all()
    np.testing.assert_allclose(forward(CONFIG, folded, TOKENS), forward(CONFIG, params, TOKENS), **EXACT)
    without = dataclasses.replace(CONFIG, qkv_bias=False)
    params = random_params(without, dtype=np.float64)
    assert fold_value_bias(without, params) is params


def test_writes_are_centred(x64):
    params = random_params(dtype=np.float64)
    centred = center_writes(params)
    for leaf in (centred["blocks"]["attn"]["out"], centred["blocks"]["mlp"]["down"]):
        np.testing.assert_allclose([x.mean(-1).max() for x in jax.tree.leaves(leaf)], 0, atol=1e-15)
    np.testing.assert_allclose(forward(CONFIG, centred, TOKENS), forward(CONFIG, params, TOKENS), **EXACT)


def test_all_of_them_go_under_grad(x64):
    params = random_params(dtype=np.float64)

    def loss(params):
        config, folded = fold_layer_norm(CONFIG, center_writes(fold_value_bias(CONFIG, params)))
        return jnp.sum(forward(config, folded, TOKENS) ** 2)

    expected = jax.grad(lambda params: jnp.sum(forward(CONFIG, params, TOKENS) ** 2))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-8), jax.grad(loss)(params), expected)
