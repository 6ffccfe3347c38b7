"""Attribution patching: the slope of the patch, for every site and over every axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import BATCH, CONFIG, T, random_params, random_tokens

from flax_gpt import forward
from flax_gpt.interp import attribution_patch, patch_sweep

PARAMS = random_params()
TOKENS, SOURCE = random_tokens(seed=1), random_tokens(seed=2)
SIZES = {"layer": CONFIG.n_layer, "head": CONFIG.n_head, "position": T}


def last_logits(logits):
    return logits[:, -1, :5]


@pytest.mark.parametrize(
    ("site", "over"),
    [("z", ("layer", "head")), ("pattern", ("layer", "position", "head")), ("mlp_out", ("layer", "position"))],
)
def test_it_is_the_slope_of_moving_towards_the_source(site, over):
    found = attribution_patch(CONFIG, PARAMS, TOKENS, SOURCE, last_logits, site=site, over=over)
    assert found.shape == (*(SIZES[name] for name in over), BATCH, 5)
    _, here = forward(CONFIG, PARAMS, TOKENS, capture=site)
    _, there = forward(CONFIG, PARAMS, SOURCE, capture=site)
    axis = {"head": 1, "position": 2} if site == "pattern" else {"head": 2, "position": 1}
    at = {"layer": 1, "head": 2, "position": 4}
    where = [slice(None)] * (here[site].ndim - 1)
    for name in over[1:]:
        where[axis[name]] = at[name]
    change = jnp.zeros_like(here[site][0]).at[tuple(where)].set((there[site] - here[site])[1][tuple(where)])

    def moved(share):
        def edit(s, layer, value):
            return value + jnp.where(layer == 1, share, 0) * change if s == site else value

        return last_logits(forward(CONFIG, PARAMS, TOKENS, edit=edit))

    _, slope = jax.jvp(moved, (0.0,), (1.0,))
    np.testing.assert_allclose(found[tuple(at[name] for name in over)], slope, rtol=1e-4, atol=1e-5)


def test_where_heads_write_little_it_is_what_patching_finds():
    def asked(logits):
        return logits[:, :5]

    attn = PARAMS["blocks"]["attn"]
    quiet = {**attn, "out": {**attn["out"], "kernel": attn["out"]["kernel"] / 300}}
    params = {**PARAMS, "blocks": {**PARAMS["blocks"], "attn": quiet}}
    estimate = attribution_patch(CONFIG, params, TOKENS, SOURCE, asked, at=-1)
    plain = asked(forward(CONFIG, params, TOKENS)[:, -1])
    exact = patch_sweep(CONFIG, params, TOKENS, SOURCE, asked, at=-1) - plain
    assert float(jnp.abs(exact).max()) > 1e-3
    np.testing.assert_allclose(estimate, exact, atol=0.02 * float(jnp.abs(exact).max()))
