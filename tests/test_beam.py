"""Beam search: against all continuations where they can be counted, and that rows do not disturb each other."""

import itertools

import jax
import numpy as np
import pytest
from tiny import NO_DROPOUT, random_params

import flax_gpt as fg

CONFIG = fg.GPTConfig(vocab_size=7, n_positions=13, n_embd=10, n_layer=2, n_head=2, **NO_DROPOUT)
PARAMS = random_params(CONFIG)
PROMPTS = [[3], [1, 2, 3, 4], [5, 6]]


def log_prob(prompt, text):
    return float(fg.token_log_probs(CONFIG, PARAMS, [[*prompt, *text]])[0, len(prompt) - 1 :].sum())


def test_a_beam_as_wide_as_all_texts_finds_the_best():
    config = fg.GPTConfig(vocab_size=14, n_positions=13, n_embd=10, n_layer=1, n_head=2, **NO_DROPOUT)
    params = random_params(config)
    found = fg.beam_search(config, params, PROMPTS, 2, num_beams=7)
    for row, prompt in enumerate(PROMPTS):
        texts = np.array(list(itertools.product(range(14), repeat=2)))
        rows = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
        sums = np.array(fg.token_log_probs(config, params, rows)[:, len(prompt) - 1 :].sum(1))
        # Of two tokens the first must be among the seven likeliest.
        first = np.asarray(fg.forward(config, params, [prompt])[0, -1])
        sums[~np.isin(texts[:, 0], np.argsort(-first)[:7])] = -np.inf
        best = np.argsort(-sums)[:7]
        np.testing.assert_array_equal(found.tokens[row], texts[best])
        np.testing.assert_allclose(found.scores[row], sums[best] / 2, atol=1e-5)
    assert (found.lengths == 2).all()


def test_scores_are_log_probabilities_over_a_power_of_the_length():
    for penalty in (0.0, 1.0, -0.7):
        found = fg.beam_search(CONFIG, PARAMS, PROMPTS, 6, num_beams=3, stop_ids=[2], length_penalty=penalty)
        assert (np.diff(found.scores, axis=1) <= 0).all()
        for row, prompt in enumerate(PROMPTS):
            for beam in range(3):
                n = int(found.lengths[row, beam])
                text = found.tokens[row, beam, :n].tolist()
                assert 2 not in text[:-1]
                assert n == 6 or text[-1] == 2
                assert not found.tokens[row, beam, n:].any()
                expected = log_prob(prompt, text) / n**penalty
                np.testing.assert_allclose(found.scores[row, beam], expected, atol=1e-5 * n)


def test_one_beam_is_greedy():
    found = fg.beam_search(CONFIG, PARAMS, PROMPTS, 8, num_beams=1)
    np.testing.assert_array_equal(found.tokens[:, 0], fg.generate(CONFIG, PARAMS, PROMPTS, 8, temperature=0.0).tokens)


@pytest.mark.slow
def test_each_row_equals_its_search_alone():
    together = fg.beam_search(CONFIG, PARAMS, PROMPTS, 8, num_beams=3, stop_ids=[2])
    for row, prompt in enumerate(PROMPTS):
        alone = fg.beam_search(CONFIG, PARAMS, [prompt], 8, num_beams=3, stop_ids=[2])
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        np.testing.assert_allclose(together.scores[row], alone.scores[0], atol=1e-5)


def test_the_length_penalty_decides_between_short_and_long():
    short, long = (
        fg.beam_search(CONFIG, PARAMS, PROMPTS, 8, num_beams=3, stop_ids=[2, 4], length_penalty=penalty).lengths[:, 0]
        for penalty in (-3.0, 3.0)
    )
    assert (short <= long).all()
    assert (short < long).any()


def test_early_stopping_takes_the_first_complete():
    eager, patient = (
        fg.beam_search(
            CONFIG, PARAMS, PROMPTS, 8, num_beams=3, stop_ids=[2, 4], early_stopping=early, length_penalty=2.0
        )
        for early in (True, False)
    )
    assert (eager.scores[:, 0] <= patient.scores[:, 0] + 1e-6).all()
    assert (eager.lengths.max(1) <= patient.lengths.max(1)).all()
    assert (eager.lengths.max(1) < patient.lengths.max(1)).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 0}, "num_beams must be from 1 to the vocabulary's 7, got 0"),
        ({"num_beams": 8}, "num_beams must be from 1 to the vocabulary's 7, got 8"),
        ({"max_new_tokens": 10}, "a prompt of 4 tokens and 10 new ones exceed n_positions=13; ask for fewer$"),
        ({"prompts": [[]]}, "at least one token"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    call = {"prompts": PROMPTS, "max_new_tokens": 3, "num_beams": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        fg.beam_search(CONFIG, PARAMS, **call)


@pytest.mark.slow
def test_it_runs_under_vmap():
    stacked = jax.tree.map(lambda x: np.stack([x, 0.5 * x]), PARAMS)
    both = jax.vmap(lambda p: fg.beam_search(CONFIG, p, PROMPTS, 5, num_beams=2))(stacked)
    np.testing.assert_array_equal(both.tokens[0], fg.beam_search(CONFIG, PARAMS, PROMPTS, 5, num_beams=2).tokens)
