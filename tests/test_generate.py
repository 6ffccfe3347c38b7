"""Generation: what is drawn from, when a row ends, and that rows, lengths and windows do not disturb each other."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_params

import flax_gpt as fg

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
    config = dataclasses.replace(CONFIG, n_positions=32)
    params = fg.init_params(config, jax.random.key(0))
    program = sys.modules["flax_gpt.generation.generate"]._run_jit
    program.clear_cache()
    for i in range(10):
        fg.generate(
            config, params, [[1] * (7 + i)], 7 + i, temperature=0.1 * i, top_k=i, top_p=1 - 0.1 * i, min_p=0.1 * i,
            repetition_penalty=1 + 0.1 * i, logit_bias={i: 0.1}, key=jax.random.key(i), stop_ids=[i],
        )  # fmt: skip
    assert program._cache_size() == 1


@pytest.mark.slow
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
        ({"top_k": -1}, "top_k must be not negative, got -1"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"stop_ids": [13]}, "stop_ids names the token id 13, outside the vocabulary of 13"),
        ({"top_p": 1.1}, "top_p must be from 0 to 1, got 1.1"),
        ({"key": None}, "needs a key"),
    ],
)
def test_bad_arguments_are_refused(params, arguments, message):
    call = {"prompts": PROMPTS, "max_new_tokens": 3, "key": jax.random.key(0), **arguments}
    with pytest.raises(ValueError, match=message):
        fg.generate(CONFIG, params, **call)


def test_log_probs_are_the_models_own(params):
    written = fg.generate(CONFIG, params, PROMPTS, 7, temperature=2.0, top_k=5, key=jax.random.key(0), stop_ids=[2, 3])
    assert min(written.lengths.tolist()) < 7
    for row, prompt in enumerate(PROMPTS):
        n = int(written.lengths[row])
        text = [*prompt, *written.tokens[row, :n].tolist()]
        expected = fg.token_log_probs(CONFIG, params, [text])[0, len(prompt) - 1 :]
        np.testing.assert_allclose(written.log_probs[row, :n], expected, atol=1e-5)
        assert not written.log_probs[row, n:].any()


@pytest.mark.slow
def test_samples_of_a_prompt_are_rows_of_their_own(params):
    key = jax.random.key(5)
    several = fg.generate(CONFIG, params, PROMPTS, 7, num_samples=3, key=key, temperature=[1.0, 2.0, 0.0] * 3)
    rows = fg.generate(
        CONFIG, params, [prompt for prompt in PROMPTS for _ in range(3)], 7, key=key, temperature=[1.0, 2.0, 0.0] * 3
    )
    np.testing.assert_array_equal(several.tokens, rows.tokens)
    assert len({tuple(row) for row in several.tokens.tolist()}) > 6


def test_rows_may_have_settings_of_their_own(params):
    written = fg.generate(
        CONFIG, params, PROMPTS, 7, temperature=[0.0, 1.0, 1.0], top_k=[0, 1, 0], key=jax.random.key(0)
    )
    greedy = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0).tokens
    np.testing.assert_array_equal(written.tokens[:2], greedy[:2])
    assert written.tokens[2].tolist() != greedy[2].tolist()


def test_a_repetition_penalty_counts_prompt_and_new_tokens(params):
    written = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0, repetition_penalty=1.7)
    for row, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(7):
            logits = np.array(fg.forward(CONFIG, params, [ids])[0, -1])
            for i in set(ids):
                logits[i] *= 1.7 if logits[i] < 0 else 1 / 1.7
            ids.append(int(logits.argmax()))
        assert written.tokens[row].tolist() == ids[len(prompt) :]
    assert not np.array_equal(written.tokens, fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0).tokens)


def test_an_edit_steers(params):
    def edit(site, layer, value):
        return value.at[..., 3].add(jnp.where(layer == 1, 50.0, 0.0)) if site == "resid_post" else value

    steered = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0, edit=edit).tokens
    assert not np.array_equal(steered, fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0).tokens)
    # An edited forward pass over the whole text finds each token the likeliest after those before it.
    text = jnp.asarray([[*PROMPTS[1], *steered[1].tolist()]])
    logits = jax.jit(lambda text: fg.forward(CONFIG, params, text, edit=edit))(text)
    np.testing.assert_array_equal(logits[0, 3:-1].argmax(-1), steered[1])


@pytest.mark.slow
def test_an_edit_may_close_over_traced_values(params):
    def steer(strength):
        def edit(site, layer, value):
            return value.at[..., 3].add(jnp.where(layer == 1, strength, 0.0)) if site == "resid_post" else value

        return fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0, edit=edit).tokens

    swept = jax.jit(jax.vmap(steer))(jnp.asarray([0.0, 50.0]))
    np.testing.assert_array_equal(swept[0], fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0).tokens)
    np.testing.assert_array_equal(swept[1], steer(50.0))


@pytest.mark.slow
def test_it_can_be_jitted_and_vmapped_over_keys(params):
    keys = jax.random.split(jax.random.key(0), 4)
    many = jax.jit(jax.vmap(lambda key: fg.generate(CONFIG, params, PROMPTS, 7, key=key).tokens))(keys)
    for key, tokens in zip(keys, many, strict=True):
        np.testing.assert_array_equal(tokens, fg.generate(CONFIG, params, PROMPTS, 7, key=key).tokens)


@pytest.mark.slow
@pytest.mark.parametrize("block", [fg.PostLNBlock, fg.NoLNBlock])
def test_other_blocks_generate(block):
    params = random_params(CONFIG, block=block)
    written = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0, block=block)
    ids = list(PROMPTS[1])
    for _ in range(7):
        ids.append(int(jnp.argmax(fg.forward(CONFIG, params, [ids], block=block)[0, -1])))
    assert written.tokens[1].tolist() == ids[4:]


@pytest.mark.slow
def test_bfloat16_generates_nearly_the_same(params):
    written = fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0, compute_dtype=jnp.bfloat16)
    for row, prompt in enumerate(PROMPTS):
        text = [*prompt, *written.tokens[row].tolist()]
        logits = fg.forward(CONFIG, params, [text])[0, len(prompt) - 1 : -1]
        chosen = jnp.take_along_axis(logits, written.tokens[row][:, None], axis=-1)[:, 0]
        # What it chose is the likeliest, to within the rounding of bfloat16.
        assert (logits.max(-1) - chosen).max() < 0.05 * jnp.abs(logits).max()


def test_dropout_is_off(params):
    config = dataclasses.replace(CONFIG, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    a = fg.generate(config, params, PROMPTS, 7, temperature=0.0)
    np.testing.assert_array_equal(a.tokens, fg.generate(CONFIG, params, PROMPTS, 7, temperature=0.0).tokens)
