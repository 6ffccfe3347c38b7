"""Generation: what is drawn from, when a row ends, and that rows, lengths and windows do not disturb each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_gpt as fg
from flax_gpt.generate import _generate, kept_tokens, sample

CONFIG = fg.GPTConfig(
    vocab_size=13, n_positions=11, n_embd=10, n_layer=2, n_head=2, initializer_range=0.5,
    embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
)  # fmt: skip
PROMPTS = [[3], [1, 2, 3, 4], [5, 6]]


@pytest.fixture(scope="module")
def params():
    return fg.init_params(CONFIG, jax.random.key(0))


def greedy_by_hand(params, prompt, steps):
    """One forward pass a token over just what there is, cropped to the context."""
    ids = list(prompt)
    for _ in range(steps):
        logits = fg.forward(CONFIG, params, [ids[-CONFIG.n_positions :]])
        ids.append(int(jnp.argmax(logits[0, -1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ([0.5, 0.3, 0.2], 0.3, 1), ([0.5, 0.3, 0.2], 0.5, 1), ([0.5, 0.3, 0.2], 0.6, 2), ([0.5, 0.3, 0.2], 0.8, 2),
        ([0.5, 0.3, 0.2], 1.0, 3), ([0.5, 0.3, 0.2], 0.0, 1), ([0.4, 0.3, 0.2, 0.1], 0.3, 1),
        ([0.4, 0.3, 0.2, 0.1], 0.5, 2), ([0.4, 0.3, 0.2, 0.1], 0.7, 2), ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
    ],
)  # fmt: skip
def test_top_p_keeps_the_smallest_set_that_reaches_p(probabilities, top_p, kept):
    order = np.random.default_rng(0).permutation(len(probabilities))
    logits = jnp.log(jnp.asarray([probabilities]))[:, order]
    expected = np.isin(order, np.arange(kept))
    np.testing.assert_array_equal(kept_tokens(logits, 0, top_p)[0], expected)


@pytest.mark.parametrize(("top_k", "kept"), [(1, 1), (2, 2), (4, 4), (0, 4), (9, 4)])
def test_top_k_keeps_k_or_all(top_k, kept):
    logits = jnp.asarray([[0.1, 0.4, 0.2, 0.3]])
    assert kept_tokens(logits, top_k, 1.0).sum() == kept
    assert kept_tokens(logits, top_k, 1.0)[0, 1]


def test_ties_keep_the_lower_ids():
    np.testing.assert_array_equal(kept_tokens(jnp.zeros((1, 5)), 2, 1.0)[0], [True, True, False, False, False])
    np.testing.assert_array_equal(kept_tokens(jnp.zeros((1, 5)), 0, 0.5)[0], [True, True, True, False, False])


def test_top_p_counts_what_top_k_leaves():
    """Of [.4 .3 .2 .1] top-k 2 leaves [4/7 3/7]: 0.5 is then reached by the first alone."""
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    np.testing.assert_array_equal(kept_tokens(logits, 2, 0.5)[0], [True, False, False, False])


def test_draws_follow_the_tempered_and_filtered_distribution():
    n = 20_000
    logits = jnp.log(jnp.asarray([0.4, 0.3, 0.2, 0.1]))
    drawn = sample(
        jnp.broadcast_to(logits, (n, 4)), jax.random.split(jax.random.key(0), n), jnp.full(n, 0.5), jnp.int32(3), 1.0
    )
    expected = np.array([0.16, 0.09, 0.04, 0]) / 0.29
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / n, expected, atol=4 * np.sqrt(0.25 / n))


def test_temperature_zero_is_argmax_row_by_row():
    logits = jnp.asarray([[0.0, 5.0, 1.0], [0.0, 0.1, 0.2]])
    keys = jax.random.split(jax.random.key(0), 200)
    temperatures = jnp.asarray([0.0, 100.0])
    drawn = jax.vmap(lambda key: sample(logits, jax.random.split(key, 2), temperatures, 0, 1.0))(keys)
    assert set(drawn[:, 0].tolist()) == {1}
    assert set(drawn[:, 1].tolist()) == {0, 1, 2}


def test_greedy_equals_one_forward_pass_a_token(params):
    written = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0)
    assert written.lengths.tolist() == [7, 7, 7]
    for row, prompt in enumerate(PROMPTS):
        assert written.tokens[row].tolist() == greedy_by_hand(params, prompt, 7)


def test_a_sliding_context_sees_the_last_tokens(params):
    prompts = [[3], list(range(9)), [i % 13 for i in range(20)]]
    written = fg.generate(CONFIG, params, prompts, 17, temperature=0.0, sliding=True)
    for row, prompt in enumerate(prompts):
        assert written.tokens[row].tolist() == greedy_by_hand(params, prompt, 17)


def test_rows_draw_alike_whatever_stands_in_the_others(params):
    key = jax.random.key(7)
    together = fg.generate(CONFIG, params, PROMPTS, 7, key=key)
    again = fg.generate(CONFIG, params, PROMPTS, 7, key=key)
    others = fg.generate(CONFIG, params, [PROMPTS[0], [9], PROMPTS[2]], 7, key=key)
    np.testing.assert_array_equal(together.tokens, again.tokens)
    np.testing.assert_array_equal(together.tokens[::2], others.tokens[::2])
    same_prompt = fg.generate(CONFIG, params, [[3]] * 5, 7, key=key)
    assert len({tuple(row) for row in same_prompt.tokens.tolist()}) == 5
    assert not np.array_equal(together.tokens, fg.generate(CONFIG, params, PROMPTS, 7, key=jax.random.key(8)).tokens)


def test_a_padded_array_is_its_rows(params):
    padded = np.full((3, 4), 99)  # padding may hold anything
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    a = fg.generate(CONFIG, params, padded, 7, lengths=[1, 4, 2], temperature=0.0)
    b = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0)
    np.testing.assert_array_equal(a.tokens, b.tokens)


def test_a_row_ends_with_its_stop_id(params):
    free = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0).tokens
    stop = int(free[1, 2])
    written = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0, stop_ids=(stop,))
    for row in range(3):
        ids = free[row].tolist()
        length = ids.index(stop) + 1 if stop in ids else 7
        assert written.lengths[row] == length
        assert written.tokens[row].tolist() == ids[:length] + [0] * (7 - length)
    assert written.lengths[1] <= 3


def test_lengths_and_settings_do_not_recompile(params):
    _generate.clear_cache()
    for i, length in enumerate(range(1, 8)):
        fg.generate(
            CONFIG, params, [[1] * length], 4, temperature=0.1 * i, top_k=i, top_p=1 - 0.1 * i, key=jax.random.key(i)
        )
    assert _generate._cache_size() == 1


def test_an_ensemble_generates_under_vmap(params):
    other = fg.init_params(CONFIG, jax.random.key(1))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, other)
    both = jax.vmap(lambda p: fg.generate(CONFIG, p, PROMPTS, 7, temperature=0.0).tokens)(stacked)
    for member, own in zip(both, (params, other), strict=True):
        np.testing.assert_array_equal(member, fg.generate(CONFIG, own, PROMPTS, 7, temperature=0.0).tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, "at least one token"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[1, 13]]}, "token id 13 at row 0, position 1 is outside the vocabulary of 13"),
        ({"prompts": np.ones((2, 3), int), "lengths": [1, 4]}, r"lengths must be from 1 to 3, got \[1, 4\]"),
        ({"prompts": np.ones((2, 3), int), "lengths": [1]}, "do not fit"),
        ({"max_new_tokens": 8}, "a prompt of 4 tokens and 8 new ones exceed n_positions=11"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be finite and not negative, got -0.1"),
        ({"top_k": -1}, "top_k must not be negative, got -1"),
        ({"top_p": 1.1}, "top_p must be from 0 to 1, got 1.1"),
        ({"key": None}, "needs a key"),
    ],
)
def test_bad_arguments_are_refused(params, arguments, message):
    call = {"prompts": PROMPTS, "max_new_tokens": 3, "key": jax.random.key(0), **arguments}
    with pytest.raises(ValueError, match=message):
        fg.generate(CONFIG, params, **call)


def test_dropout_is_off(params):
    config = dataclasses.replace(CONFIG, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    a = fg.generate(config, params, PROMPTS, 7, temperature=0.0)
    np.testing.assert_array_equal(a.tokens, fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0).tokens)
