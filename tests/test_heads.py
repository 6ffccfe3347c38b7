"""What heads look at, and their circuits."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_params, random_tokens

from flax_gpt import forward
from flax_gpt.interp import composition, copying_scores, fold_layer_norm, head_scores, ov_circuit, qk_circuit

PARAMS = random_params()
L, H, K, D = CONFIG.n_layer, CONFIG.n_head, CONFIG.head_width, CONFIG.n_embd


def test_scores_are_means_of_the_pattern_over_the_places_in_question():
    tokens = np.array([[4, 9, 4, 9, 9, 3, 4], [1, 2, 3, 4, 5, 1, 5]])
    mask = np.ones(tokens.shape, int)
    mask[0, 0] = 0
    _, acts = forward(CONFIG, PARAMS, tokens, mask=mask, capture="pattern")
    pattern = np.asarray(acts["pattern"], np.float64)
    scores = head_scores(CONFIG, PARAMS, tokens, mask=mask)
    places = {"previous_token": [], "duplicate_token": [], "induction": []}
    for b, row in enumerate(tokens):
        for t in range(len(row)):
            real = [s for s in range(t + 1) if mask[b, s] and mask[b, t]]
            places["previous_token"].append((b, t, [s for s in real if s == t - 1]))
            places["duplicate_token"].append((b, t, [s for s in real if s < t and row[s] == row[t]]))
            after = [s for s in real if s < t and s >= 1 and row[s - 1] == row[t] and mask[b, s - 1]]
            places["induction"].append((b, t, after))
    for name, queries in places.items():
        shares = [pattern[:, b, :, t, keys].sum(0) for b, t, keys in queries if keys]
        np.testing.assert_allclose(getattr(scores, name), np.mean(shares, axis=0), rtol=1e-5, atol=1e-6)


def test_a_score_without_any_place_is_nan():
    scores = head_scores(CONFIG, PARAMS, [[1, 2, 3]])
    assert np.isnan(scores.induction).all()
    assert np.isnan(scores.duplicate_token).all()
    assert np.isfinite(scores.previous_token).all()


def test_the_circuits_give_scores_and_outputs():
    # Without biases in attention and with the LayerNorms folded, what attention reads is the normalised stream.
    params = random_params()
    attn = params["blocks"]["attn"]
    attn["qkv"]["bias"] = jnp.zeros_like(attn["qkv"]["bias"])
    params["blocks"]["ln_1"]["bias"] = jnp.zeros_like(params["blocks"]["ln_1"]["bias"])
    config, folded = fold_layer_norm(CONFIG, params)
    tokens = random_tokens()
    _, acts = forward(config, folded, tokens, capture=("ln_1", "attn_scores", "pattern", "z"))
    for layer, head in np.ndindex(L, H):
        x = acts["ln_1"][layer]
        scores = jnp.einsum("btd,de,bse->bts", x, qk_circuit(folded, layer, head), x)
        np.testing.assert_allclose(scores, acts["attn_scores"][layer][:, head], rtol=1e-4, atol=1e-4)
        wrote = jnp.einsum("bts,bsd,de->bte", acts["pattern"][layer][:, head], x, ov_circuit(folded, layer, head))
        expected = acts["z"][layer][:, :, head] @ folded["blocks"]["attn"]["out"]["kernel"][layer, head]
        np.testing.assert_allclose(wrote, expected, rtol=1e-4, atol=1e-4)


def test_copying_is_read_off_the_whole_circuit():
    scores = copying_scores(CONFIG, PARAMS)
    wte = np.asarray(PARAMS["wte"], np.float64)
    for layer, head in np.ndindex(L, H):
        whole = wte @ np.asarray(ov_circuit(PARAMS, layer, head), np.float64) @ wte.T  # [v, v]
        values = np.linalg.eigvals(whole)
        np.testing.assert_allclose(scores[layer, head], values.sum().real / np.abs(values).sum(), atol=1e-4)


def test_a_head_that_writes_what_it_reads_copies():
    params = random_params()
    attn = params["blocks"]["attn"]
    value = attn["qkv"]["kernel"][:, :, 2]  # [l, d, h, k]
    attn["out"]["kernel"] = jnp.moveaxis(value, 1, 3)  # W_O = W_V^T
    np.testing.assert_allclose(copying_scores(CONFIG, params), 1, atol=1e-4)
    attn["out"]["kernel"] = -attn["out"]["kernel"]
    np.testing.assert_allclose(copying_scores(CONFIG, params), -1, atol=1e-4)


def test_composition_is_the_norm_of_the_product_over_the_norms():
    found = composition(PARAMS)
    norm = np.linalg.norm
    circuits = {
        (layer, head): (
            np.asarray(ov_circuit(PARAMS, layer, head), np.float64),
            np.asarray(qk_circuit(PARAMS, layer, head), np.float64),
        )
        for layer, head in np.ndindex(L, H)
    }
    for earlier, (writes, _) in circuits.items():
        for later, (ov, qk) in circuits.items():
            for name, reads in (("q", qk), ("k", qk.T), ("v", ov)):
                expected = norm(writes @ reads) / norm(writes) / norm(reads) if earlier[0] < later[0] else 0
                np.testing.assert_allclose(getattr(found, name)[earlier + later], expected, rtol=1e-4, atol=1e-6)


def test_scores_of_rows_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match="more than n_positions"):
        head_scores(CONFIG, PARAMS, random_tokens(shape=(1, CONFIG.n_positions + 1)))
