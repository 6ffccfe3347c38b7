"""Sweeps of patches and ablations: each member equals one run with a plain edit, and all are one program."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import BATCH, CONFIG, T, random_params, random_tokens

from flax_gpt import Block, NoLNBlock, PostLNBlock, forward
from flax_gpt.interp import ablate_heads, patch_sweep, replace
from flax_gpt.interp.passes import in_chunks

PARAMS = random_params()
TOKENS, SOURCE = random_tokens(seed=1), random_tokens(seed=2)
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
L, H = CONFIG.n_layer, CONFIG.n_head


def last_logits(logits):
    return logits[:, -1, :5]


def one_by_one(site, axes, params=PARAMS, mask=None, block=Block):
    """`patch_sweep` as a loop over plain runs, each with an edit written out."""
    _, acts = forward(CONFIG, params, SOURCE, capture=site, mask=mask, block=block)
    sizes = {"layer": L, "head": H, "position": T}
    head_axis = 1 if site in ("attn_scores", "pattern") else 2
    position_axis = 2 if site in ("attn_scores", "pattern") else 1
    results = np.zeros([sizes[name] for name in axes] + [BATCH, 5])
    for index in np.ndindex(*results.shape[: len(axes)]):
        at = dict(zip(axes, index, strict=True))
        where = [slice(None)] * (acts[site].ndim - 1)
        if "head" in at:
            where[head_axis] = at["head"]
        if "position" in at:
            where[position_axis] = at["position"]
        where = tuple(where)

        def edit(here, layer, value, at=at, where=where):
            if here != site or layer != at["layer"]:
                return value
            return value.at[where].set(acts[site][at["layer"]][where])

        logits = forward(CONFIG, params, TOKENS, edit=edit, layers="unroll", mask=mask, block=block)
        results[index] = last_logits(logits)
    return results


@pytest.mark.parametrize(
    ("site", "over"),
    [
        ("z", ("layer", "head")),
        ("resid_pre", ("layer", "position")),
        ("mlp_out", ("layer",)),
        pytest.param("pattern", ("layer", "position", "head"), marks=pytest.mark.slow),
        pytest.param("k", ("layer", "head", "position"), marks=pytest.mark.slow),
        pytest.param("resid_post", ("layer", "position"), marks=pytest.mark.slow),
    ],
)
def test_a_sweep_is_what_single_runs_give(site, over):
    found = patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, last_logits, site=site, over=over)
    np.testing.assert_allclose(found, one_by_one(site, over), **CLOSE)


@pytest.mark.parametrize("block", [NoLNBlock, pytest.param(PostLNBlock, marks=pytest.mark.slow)])
def test_another_block_is_swept_like_gpt2s(block):
    params = random_params(block=block)
    found = patch_sweep(CONFIG, params, TOKENS, SOURCE, last_logits, over=("layer",), block=block)
    np.testing.assert_allclose(found, one_by_one("z", ("layer",), params, block=block), **CLOSE)


def test_padding_stays_without_influence():
    mask = np.ones((BATCH, T), int)
    mask[0, :3] = 0
    found = patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, last_logits, mask=mask)
    np.testing.assert_allclose(found, one_by_one("z", ("layer", "head"), mask=mask), **CLOSE)


def test_chunks_and_reading_one_position_change_nothing():
    whole = patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, last_logits)
    one_at_a_time = patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, last_logits, max_bytes=1)
    np.testing.assert_allclose(one_at_a_time, whole, **CLOSE)

    def first_five(logits):
        return logits[:, :5]

    for at in (-1, T - 1, [T - 1] * BATCH):
        np.testing.assert_allclose(patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, first_five, at=at), whole, **CLOSE)
    rows = patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, first_five, at=[2, 7])
    everywhere = patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, lambda logits: logits[..., :5])
    np.testing.assert_allclose(rows, everywhere[:, :, [0, 1], [2, 7]], **CLOSE)


def test_a_sweep_compiles_once_and_goes_under_jit_grad_and_vmap():
    traced = []

    def counted(logits):
        traced.append(None)
        return last_logits(logits).sum()

    first = patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, counted)
    n = len(traced)
    second = patch_sweep(CONFIG, PARAMS, SOURCE, TOKENS, counted)
    assert len(traced) == n
    assert first.shape == second.shape == (L, H)

    @jax.jit
    def asked(params, token):  # a metric that closes over a traced value
        return patch_sweep(CONFIG, params, TOKENS, SOURCE, lambda logits: logits[:, -1, token].sum())

    both = jax.vmap(asked, (None, 0))(PARAMS, jnp.array([3, 4]))
    np.testing.assert_allclose(
        both[1], patch_sweep(CONFIG, PARAMS, TOKENS, SOURCE, lambda x: x[:, -1, 4].sum()), **CLOSE
    )
    gradient = jax.grad(lambda params: asked(params, 3)[1, 2])(PARAMS)
    chex.assert_tree_all_finite(gradient)
    slope = (asked(jax.tree.map(lambda x, g: x + 1e-3 * g, PARAMS, gradient), 3)[1, 2] - both[0][1, 2]) / 1e-3
    squares = sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradient))
    assert slope == pytest.approx(squares, rel=0.1)


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_an_ablated_head_gives_what_a_plain_edit_gives(kind):
    key = jax.random.key(3)
    reference = random_tokens(shape=(5, T), seed=7)
    found = ablate_heads(CONFIG, PARAMS, TOKENS, last_logits, kind=kind, reference=reference, key=key)
    assert found.shape == (L, H, BATCH, 5)
    _, acts = forward(CONFIG, PARAMS, reference, capture="z")
    for layer in range(L):
        z = acts["z"][layer]
        if kind == "zero":
            new = jnp.zeros_like(z[:1])
        elif kind == "mean":
            new = jnp.mean(z, axis=(0, 1), keepdims=True)
        else:
            rows = [int(row) for row in jax.random.randint(key, (BATCH,), 0, 5)]
            new = z[jnp.array(rows)]
        for head in range(H):
            logits = forward(CONFIG, PARAMS, TOKENS, edit=replace("z", layer, new, head=head))
            np.testing.assert_allclose(found[layer, head], last_logits(logits), **CLOSE)


def test_means_are_over_tokens_and_a_row_is_never_its_own_sample():
    mask = np.ones((BATCH, T), int)
    mask[1, :4] = 0
    _, acts = forward(CONFIG, PARAMS, TOKENS, mask=mask, capture="z")
    mean = (acts["z"][1] * mask[:, :, None, None]).sum((0, 1)) / mask.sum()
    logits = forward(CONFIG, PARAMS, TOKENS, mask=mask, edit=replace("z", 1, mean, head=2))
    found = ablate_heads(CONFIG, PARAMS, TOKENS, last_logits, mask=mask)
    np.testing.assert_allclose(found[1, 2], last_logits(logits), **CLOSE)

    _, acts = forward(CONFIG, PARAMS, TOKENS, capture="z")
    logits = forward(CONFIG, PARAMS, TOKENS, edit=replace("z", 0, acts["z"][0][::-1], head=1))
    found = ablate_heads(CONFIG, PARAMS, TOKENS, last_logits, kind="resample", key=jax.random.key(0))
    np.testing.assert_allclose(found[0, 1], last_logits(logits), **CLOSE)  # of two rows, the other one


@pytest.mark.parametrize("n", [1, 7, 12])
@pytest.mark.parametrize("budget", [1, 30, 10**6])
def test_chunks_cover_every_member_once(n, budget):
    members = {"a": jnp.arange(n), "b": jnp.arange(n) * 10.0}
    found = in_chunks(lambda m: (m["a"] + m["b"], m["a"][:, None]), members, 10, budget)
    np.testing.assert_array_equal(found[0], np.arange(n) * 11.0)
    assert found[1].shape == (n, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"over": ("head", "layer")}, "'layer', then any of"),
        ({"over": ("layer", "layer")}, "each once"),
        ({"over": ("layer", "query")}, "got 'query'"),
        ({"site": "mlp_out"}, "'mlp_out' has no heads; those that have are q, k"),
        ({"site": "nowhere", "over": ("layer",)}, "no site 'nowhere'"),
        ({"at": T}, f"at={T} is outside the {T} positions"),
        ({"at": [0, 1, 2]}, "one for each of 2 rows"),
        (
            {"source": random_tokens(shape=(BATCH, T - 1))},
            r"tokens have shape \(2, 11\) and source has shape \(2, 10\)",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments, message):
    arguments = {"source": SOURCE, **arguments}
    with pytest.raises(ValueError, match=message):
        patch_sweep(CONFIG, PARAMS, TOKENS, metric=last_logits, **arguments)


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        (TOKENS, {"kind": "noise"}, "kind must be zero, mean or resample, got 'noise'"),
        (TOKENS, {"kind": "resample"}, "needs a key"),
        (TOKENS[:1], {"kind": "resample", "key": jax.random.key(0)}, "needs another row"),
        (TOKENS, {"kind": "resample", "key": jax.random.key(0), "reference": SOURCE[:, :-1]}, "10 tokens.*11"),
    ],
)
def test_a_wrong_ablation_is_named(tokens, arguments, message):
    with pytest.raises(ValueError, match=message):
        ablate_heads(CONFIG, PARAMS, tokens, last_logits, **arguments)
